// Small-M GEMM for Hopper (sm_90a): out[t, n] = sum_k x[t, k] w[n, k], optionally added to a residual,
// optionally silu(gate) x up. Weights are wgmma's A operand (64 of their rows an instruction), rows of x its B operand.
//
// A cluster computes one tile of kTileN weight rows, or kMulticast neighbouring tiles; kSplitK CTAs share a tile's K. In
// a CTA one thread issues TMA loads, one or two warpgroups multiply. Weight prefetch under PDL: weights never change, so
// the first loads of the ring are issued before griddepcontrol.wait, while the previous kernel still runs. Activations
// are read and written only after the wait. launch_dependents also comes after it: when the next kernel starts, all
// kernels before this one have ended, as with a usual launch.
//
// The accumulators are copied from registers to shared memory (in place of the ring) by short unrolled code and stored
// from there by loops: straight-line code that runs once is bound by the instruction cache. Split-K: the tile's results
// are cut into bands of 8 rows of x and each CTA owns some bands. The other CTAs send their partial sums to the owner by
// st.async, counted by a barrier of the owner, once all CTAs have signalled that their rings are no longer read. The owner
// adds them in the order of the CTAs, so that results are deterministic.
//
// Multicast: kMulticast CTAs of a cluster with neighbouring tiles and the same k blocks each load a part of the rows of x,
// which TMA writes to all of them. The rank in the cluster is part * kMulticast + tile.
//
// Gate and up alternate every 8 rows in shared memory, so that a thread holds both sums of a feature. The deferred norm
// needs the sum of squares of each row of x. If the kernel that produced x wrote partial sums of squares (one for each of
// its tiles), they are added while the first tiles arrive. Otherwise each CTA sums squares of its share of the rows and
// of K from shared memory and sends them to the cluster; that takes 10% longer.
//
// Constants set at compile time: kTileN (64, 128, 256), kRows (8 to 256, a multiple of 8: rows of x padded), kStages, kIsGated,
// kIsHalf, kMinCtas, kSplitK, kMulticast (1, 2, 4; kRows a multiple of 8 times as many), kMaxTurns; `wgmma` for kRows.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kTileK = 64;                           // Numbers: 128 bytes, a row of the swizzle atom.
constexpr int kGroups = kTileN == 64 ? 1 : 2;        // Warpgroups that multiply.
constexpr int kBlocks = kTileN / (64 * kGroups);     // Blocks of 64 weight rows of each.
constexpr int kConsumers = 128 * kGroups;            // Threads.
constexpr int kThreads = kConsumers + 32;
constexpr int kColumns = kIsGated ? kTileN / 2 : kTileN;  // Features out of a tile.
constexpr int kClusterCtas = kSplitK * kMulticast;
constexpr u32 kWeightBytes = kTileN * kTileK * 2;
constexpr u32 kRowBytes = kRows * kTileK * 2;
constexpr u32 kStageBytes = kWeightBytes + kRowBytes;
constexpr u32 kRingBytes = kStages * kStageBytes;

// Sums in shared memory: [band][block][warp][lane] of 4 float32. 64 bytes between warps: the 8 lanes that read at once read
// those of two warps, from other banks.
constexpr int kBands = kRows / 8, kMaxBands = (kBands + kSplitK - 1) / kSplitK;  // Of one CTA.
constexpr u32 kWarpBytes = 32 * 16 + 64, kBlockBytes = kConsumers / 32 * kWarpBytes, kBandBytes = kBlocks * kBlockBytes;
constexpr u32 kOthersAt = kBands * kBandBytes;  // Others' sums of own bands: [CTA][band].
constexpr u32 kFinishBytes = kOthersAt + (kSplitK - 1) * kMaxBands * kBandBytes;

// Behind the ring: partial sums of squares, of x [part of K][kRows] or of results [own row][piece], then barriers.
constexpr int kRowPieces = kColumns / 8;
constexpr u32 kSquareSumsAt = kRingBytes > kFinishBytes ? kRingBytes : kFinishBytes;
constexpr u32 kBarriersAt = kSquareSumsAt + (kIsGated ? kSplitK * kRows : kMaxBands * 8 * kRowPieces) * 4;
// A CTA sums squares of so many rows; 8 threads a row, each of 16 bytes of it; so many rows a thread.
constexpr int kMulticastRows = kRows / kMulticast;
constexpr int kSquareRows = (kMulticastRows + kConsumers / 8 - 1) / (kConsumers / 8);

// ptx.cuh stands here.

// eps: negative if rows are not normed. square_sums: partial sums of squares of x's rows [num_square_sums][num_rows], or
// null. square_sums_out: those of the results' rows [tile][num_rows], or null.
struct Sizes {
  int num_rows, num_out, num_in;
  float eps;
  const float* square_sums;
  int num_square_sums;
  float* square_sums_out;
};

// Whether this kernel computes the sums of squares itself.
DEVICE bool sums_squares(const Sizes& sizes) { return kIsGated && sizes.eps >= 0.0f && !sizes.square_sums; }

// One CTA's place, and its k blocks. part: of kSplitK of K; neighbour: of kMulticast tiles.
struct Share {
  u32 base;
  int part, neighbour, tile, first_block, num_blocks;
};

DEVICE u32 stage_at(const Share& share, int stage) { return share.base + stage * kStageBytes; }
DEVICE u32 full_barrier(const Share& share, int stage) { return share.base + kBarriersAt + stage * 8; }
DEVICE u32 empty_barrier(const Share& share, int stage) { return share.base + kBarriersAt + (kStages + stage) * 8; }
// No ring of those that share K is read any more; others' sums and squares are there.
DEVICE u32 free_barrier(const Share& share) { return share.base + kBarriersAt + 2 * kStages * 8; }
DEVICE u32 sent_barrier(const Share& share) { return share.base + kBarriersAt + (2 * kStages + 1) * 8; }

// The bands of results that a part's CTA owns; and who owns a band.
DEVICE int first_band(int part) { return kBands * part / kSplitK; }
DEVICE int owner_of(int band) { return ((band + 1) * kSplitK - 1) / kBands; }

// Weight rows [num_out, K] of a tile, or gate's and those of up. What lies outside is zeros, and is not stored.
DEVICE void load_weights(const Share& share, const TensorMap* map, int index, int stage) {
  const int column = (share.first_block + index) * kTileK;
  const u32 to = stage_at(share, stage), barrier = full_barrier(share, stage);
  if (kIsGated) {
    load_gated_box(to, map, column, share.tile * (kColumns / 8), barrier, kEvictFirst);
  } else {
    load_box(to, map, column, share.tile * kTileN, barrier, kEvictFirst);
  }
}

DEVICE void load_rows(const Share& share, const TensorMap* map, int index, int stage) {
  const int column = (share.first_block + index) * kTileK;
  const u32 to = stage_at(share, stage) + kWeightBytes, barrier = full_barrier(share, stage);
  if (kMulticast == 1) {
    load_box(to, map, column, 0, barrier, kEvictLast);
  } else {
    const u16 ctas = (u16)(((1u << kMulticast) - 1) << share.part * kMulticast);
    load_multicast_box(to + share.neighbour * kMulticastRows * kTileK * 2, map, column, share.neighbour * kMulticastRows, barrier,
                    kEvictLast, ctas);
  }
}

// Bytes that others of the cluster send to this CTA.
DEVICE u32 sent_bytes(const Share& share, const Sizes& sizes) {
  const int num_bands = first_band(share.part + 1) - first_band(share.part);
  u32 bytes = (kSplitK - 1) * num_bands * kBlocks * kConsumers * 16;
  if (sums_squares(sizes)) bytes += (kClusterCtas - 1) * kMulticastRows * 4;
  return bytes;
}

// Weight prefetch by one thread, before griddepcontrol.wait: fills the ring.
DEVICE int begin(const Share& share, const Sizes& sizes, const TensorMap* w_map, const TensorMap* x_map) {
  prefetch_map(w_map);
  prefetch_map(x_map);
  for (int stage = 0; stage < kStages; ++stage) {
    barrier_init(full_barrier(share, stage), 1);
    barrier_init(empty_barrier(share, stage), kConsumers / 32 * kMulticast);
  }
  barrier_init(free_barrier(share), kSplitK);
  barrier_init(sent_barrier(share), 1);
  barrier_init_fence();
  const int early = share.num_blocks < kStages ? share.num_blocks : kStages;
  for (int index = 0; index < early; ++index) {
    // Weights and rows complete one phase: the rows' bytes are expected though their loads are issued later.
    barrier_expect(full_barrier(share, index), kStageBytes);
    load_weights(share, w_map, index, index);
  }
  barrier_expect(sent_barrier(share), sent_bytes(share, sizes));
  return early;
}

// The remaining loads, by one thread, after griddepcontrol.wait.
DEVICE void produce(const Share& share, const TensorMap* w_map, const TensorMap* x_map, int early) {
  for (int index = 0; index < early; ++index) load_rows(share, x_map, index, index);
  int stage = 0;
  u32 parity = 0;  // Of the phase that ends when the consumers release the stage for the first, second, ... time.
  for (int index = early; index < share.num_blocks; ++index) {
    barrier_wait(empty_barrier(share, stage), parity);
    barrier_expect(full_barrier(share, stage), kStageBytes);
    load_weights(share, w_map, index, stage);
    load_rows(share, x_map, index, stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// A warp's wgmmas that read the stage are over: with all warps' arrivals it is free.
DEVICE void release(const Share& share, int stage) {
  const int lane = thread_index() % 32;
  sync_warp();
  if (kMulticast == 1) {
    if (lane == 0) barrier_arrive(empty_barrier(share, stage));
  } else if (lane < kMulticast) {
    // Neighbours write rows into this CTA's stage too: each has to know that it is free.
    barrier_arrive_at(of_cta(empty_barrier(share, stage), share.part * kMulticast + lane));
  }
}

// D's fragment: number 4 j + 2 h + c of a thread is weight row 16 warp + lane / 4 + 8 h of its block and x's row
// 8 j + lane % 4 * 2 + c: of band j.
typedef float Sums[kBlocks][kRows / 2];

// The CTA's k blocks. row_square_sums: of the rows thread / 8, + kConsumers / 8, ... of the CTA's share, 16 bytes in 128 each.
DEVICE void multiply(const Share& share, const Sizes& sizes, Sums& sums, float (&row_square_sums)[kSquareRows]) {
  const int thread = thread_index(), group = thread / 128;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[block][i] = 0.0f;
#pragma unroll
  for (int i = 0; i < kSquareRows; ++i) row_square_sums[i] = 0.0f;
  int stage = 0, before = kStages - 1;
  u32 parity = 0;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) pin(sums[block][i]);
  for (int index = 0; index < share.num_blocks; ++index) {
    barrier_wait(full_barrier(share, stage), parity);
    const u32 weights = stage_at(share, stage) + group * kBlocks * 64 * kTileK * 2;
    const u32 rows = stage_at(share, stage) + kWeightBytes;
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        wgmma(sums[block], descriptor(weights + block * 64 * kTileK * 2 + k * 32), descriptor(rows + k * 32));
    wgmma_end();
    if (sums_squares(sizes)) {
      // The swizzle moves 16 bytes about within a row, which a sum over the row does not see.
#pragma unroll
      for (int i = 0; i < kSquareRows; ++i) {
        const int row = thread / 8 + i * (kConsumers / 8);
        if (row < kMulticastRows) {
          const uint4 x = load_shared(rows + (share.neighbour * kMulticastRows + row) * kTileK * 2 + thread % 8 * 16);
          row_square_sums[i] += sum_of_squares(x.x) + sum_of_squares(x.y) + sum_of_squares(x.z) + sum_of_squares(x.w);
        }
      }
    }
    // The wgmmas before these are over. Nobody waits for stages that are not filled again.
    wgmma_wait<1>();
    if (index > 0 && index - 1 + kStages < share.num_blocks) release(share, before);
    before = stage;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) pin(sums[block][i]);
}

// To all of the cluster.
DEVICE void send_square_sums(const Share& share, float (&row_square_sums)[kSquareRows]) {
  const int thread = thread_index(), own = share.part * kMulticast + share.neighbour;
#pragma unroll
  for (int i = 0; i < kSquareRows; ++i) {
    float sum = row_square_sums[i];
    for (int mask = 1; mask < 8; mask *= 2) sum += shuffle_xor(sum, mask);
    const int row = thread / 8 + i * (kConsumers / 8), rank = thread % 8;
    // The threads that have the sum take a CTA each.
    if (row >= kMulticastRows || rank >= kClusterCtas) continue;
    const u32 to = share.base + kSquareSumsAt + (share.part * kRows + share.neighbour * kMulticastRows + row) * 4;
    if (rank == own) {
      store_shared(to, sum);
    } else {
      send_one(of_cta(to, rank), sum, of_cta(sent_barrier(share), rank));
    }
  }
}

// The thread's 4 sums of a band and block.
DEVICE u32 sums_at(int thread) { return thread / 32 * kWarpBytes + thread % 32 * 16; }

DEVICE void leave_sums(const Share& share, const Sums& sums) {
  const u32 to = share.base + sums_at(thread_index());
#pragma unroll
  for (int band = 0; band < kBands; ++band)
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float* from = &sums[block][4 * band];
      store_own(to + band * kBandBytes + block * kBlockBytes, float4{from[0], from[1], from[2], from[3]});
    }
}

// Where an owner keeps what `part` sends: of its first band.
DEVICE u32 others_at(int owner, int part) {
  return kOthersAt + (part < owner ? part : part - 1) * kMaxBands * kBandBytes;
}

// Each thread what it left itself.
DEVICE void send_sums(const Share& share) {
  const u32 at = share.base + sums_at(thread_index());
#pragma unroll 4
  for (int index = 0; index < kBands * kBlocks; ++index) {
    const int band = index / kBlocks, owner = owner_of(band), rank = owner * kMulticast + share.neighbour;
    if (owner == share.part) continue;
    const u32 to = at + others_at(owner, share.part) + (band - first_band(owner)) * kBandBytes;
    const u32 block_offset = index % kBlocks * kBlockBytes;
    send(of_cta(to + block_offset, rank), load_own(at + band * kBandBytes + block_offset),
         of_cta(sent_barrier(share), rank));
  }
}

// A warp stores a band's 64 weight rows in a turn. A lane takes a pair of x's rows and 4 of a warp's 8 lines of sums: those
// of weight rows n to n + 3 and n + 8 to n + 11, which are 4 features' gate and up, or 8 features in two groups of 4.
// num_out is a multiple of 8.
struct Piece {
  int band, row, column;  // The first of both; rows of all bands, columns of the tile.
  u32 from;               // In shared memory, within the band.
  bool is_column[2];      // Whether the groups are there.
};

constexpr int kWarps = kConsumers / 32, kBandTurns = kTileN / 64;

DEVICE Piece piece_of(const Share& share, const Sizes& sizes, int turn) {
  // Lanes that read at once read of two warps' sums, from other banks.
  const int lane = thread_index() % 32, pair = lane % 4, unit = lane / 4 % 4, half = lane / 16;
  const int tile_block = turn % kBandTurns, warp = tile_block / kBlocks * 4 + unit;
  Piece piece;
  piece.band = first_band(share.part) + turn / kBandTurns;
  piece.row = piece.band * 8 + pair * 2;
  piece.column = (tile_block * 4 + unit) * (kIsGated ? 8 : 16) + half * 4;
  piece.from = tile_block % kBlocks * kBlockBytes + warp * kWarpBytes + (half * 16 + pair) * 16;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const int out_column = share.tile * kColumns + piece.column + group * 8;
    piece.is_column[group] = piece.band < first_band(share.part + 1) && out_column < sizes.num_out;
  }
  return piece;
}

DEVICE u64 at_of(const Share& share, const Sizes& sizes, const Piece& piece, int c, int group) {
  return (u64)(piece.row + c) * sizes.num_out + share.tile * kColumns + piece.column + group * 8;
}

// What a turn's piece is added to: of row c, group.
struct Befores {
  uint2 at[2][2];
};

DEVICE Befores load_residual(const Share& share, const Sizes& sizes, const u16* residual, int turn) {
  const Piece piece = piece_of(share, sizes, turn);
  Befores befores;
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const bool is_there = residual && piece.is_column[group] && piece.row + c < sizes.num_rows;
      befores.at[c][group] =
          is_there ? *(const uint2*)(residual + at_of(share, sizes, piece, c, group)) : uint2{0, 0};
    }
  return befores;
}

// A piece's lines over all parts, in their order: x's rows' sums of a weight row, then of the one 8 behind it.
DEVICE void whole_sums(const Share& share, const Piece& piece, float4 (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int part = 0; part < kSplitK; ++part) {
    u32 from = share.base + piece.from;
    if (part == share.part) {
      from += piece.band * kBandBytes;
    } else {
      from += others_at(share.part, part) + (piece.band - first_band(share.part)) * kBandBytes;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 sum = load_own(from + i * 64);
      sums[i].x += sum.x, sums[i].y += sum.y, sums[i].z += sum.z, sums[i].w += sum.w;
    }
  }
}

// Adds the partial sums of squares of rows thread, thread + kConsumers, ...
constexpr int kGivenRows = (kRows + kConsumers - 1) / kConsumers;

DEVICE void load_square_sums(const Sizes& sizes, float (&given)[kGivenRows]) {
#pragma unroll
  for (int i = 0; i < kGivenRows; ++i) {
    const int row = thread_index() + i * kConsumers, nearest = row < sizes.num_rows ? row : 0;
    float sum = 0.0f;
#pragma unroll 8
    for (int index = 0; index < sizes.num_square_sums; ++index) sum += sizes.square_sums[index * sizes.num_rows + nearest];
    given[i] = sum;
  }
}

// 1 / sqrt(mean(x^2) + eps) of a row.
DEVICE float inverse_rms(const Share& share, const Sizes& sizes, int row) {
  if (sizes.eps < 0.0f) return 1.0f;
  float sum = load_one(share.base + kSquareSumsAt + row * 4);
  if (!sizes.square_sums)
#pragma unroll
    for (int part = 1; part < kSplitK; ++part) sum += load_one(share.base + kSquareSumsAt + (part * kRows + row) * 4);
  return reciprocal_root(sum * (1.0f / sizes.num_in) + sizes.eps);
}

DEVICE uint2 pack4(float a, float b, float c, float d) { return uint2{pack(a, b), pack(c, d)}; }

// silu(gate) x up of own bands to memory, two turns at once, so that what they read overlaps.
DEVICE void store_gated(const Share& share, const Sizes& sizes, u16* out) {
  const int num_turns = (first_band(share.part + 1) - first_band(share.part)) * kBandTurns, last = num_turns - 1;
  for (int turn = thread_index() / 32; turn < num_turns; turn += 2 * kWarps) {
    Piece pieces[2];
    float4 sums[2][4];
    float factors[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = turn + i * kWarps;
      pieces[i] = piece_of(share, sizes, own < last ? own : last);
      pieces[i].is_column[0] &= own <= last;
      whole_sums(share, pieces[i], sums[i]);
#pragma unroll
      for (int c = 0; c < 2; ++c) factors[i][c] = inverse_rms(share, sizes, pieces[i].row + c);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float gated[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        gated[0][j] = silu(sums[i][j].x * factors[i][0]) * (sums[i][j].z * factors[i][0]);
        gated[1][j] = silu(sums[i][j].y * factors[i][1]) * (sums[i][j].w * factors[i][1]);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (pieces[i].is_column[0] && pieces[i].row + c < sizes.num_rows)
          *(uint2*)(out + at_of(share, sizes, pieces[i], c, 0)) =
              pack4(gated[c][0], gated[c][1], gated[c][2], gated[c][3]);
    }
  }
}

// Own bands to memory; befores: what the first turn's piece is added to.
DEVICE void store(const Share& share, const Sizes& sizes, u16* out, const u16* residual, Befores befores) {
  const int num_turns = (first_band(share.part + 1) - first_band(share.part)) * kBandTurns;
  for (int turn = thread_index() / 32; turn < num_turns; turn += kWarps) {
    const Befores nexts = load_residual(share, sizes, residual, turn + kWarps);
    const Piece piece = piece_of(share, sizes, turn);
    float4 sums[4];
    whole_sums(share, piece, sums);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float row_square_sums = 0.0f;
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const uint2 before = befores.at[c][group];
        float numbers[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          numbers[j] = group ? (c ? sums[j].w : sums[j].z) : (c ? sums[j].y : sums[j].x);
        const uint2 packed = pack4(numbers[0] + low(before.x), numbers[1] + high(before.x), numbers[2] + low(before.y),
                                   numbers[3] + high(before.y));
        if (!piece.is_column[group] || piece.row + c >= sizes.num_rows) continue;
        *(uint2*)(out + at_of(share, sizes, piece, c, group)) = packed;
        row_square_sums += sum_of_squares(packed.x) + sum_of_squares(packed.y);
      }
      // Of 8 columns of a row, of which each lane has its place.
      if (sizes.square_sums_out) {
        const int row = piece.row + c - first_band(share.part) * 8, lane = thread_index() % 32;
        store_shared(share.base + kSquareSumsAt + (row * kRowPieces + turn % kBandTurns * 8 + lane / 4) * 4, row_square_sums);
      }
    }
    befores = nexts;
  }
}

// Of the tile's columns, of own rows.
DEVICE void store_square_sums(const Share& share, const Sizes& sizes) {
  const int first = first_band(share.part) * 8, end = first_band(share.part + 1) * 8;
  for (int row = first + thread_index(); row < end && row < sizes.num_rows; row += kConsumers) {
    float sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < kRowPieces; ++piece)
      sum += load_one(share.base + kSquareSumsAt + ((row - first) * kRowPieces + piece) * 4);
    sizes.square_sums_out[share.tile * sizes.num_rows + row] = sum;
  }
}

// Work of the warpgroups after griddepcontrol.wait.
DEVICE void consume(const Share& share, const Sizes& sizes, u16* out, const u16* residual) {
  Sums sums;
  float row_square_sums[kSquareRows], given[kGivenRows];
  const bool is_given = kIsGated && sizes.square_sums;
  if (is_given) load_square_sums(sizes, given);
  multiply(share, sizes, sums, row_square_sums);
  Befores befores;
  if (!kIsGated) befores = load_residual(share, sizes, residual, thread_index() / 32);
  if (sums_squares(sizes)) send_square_sums(share, row_square_sums);
  if (is_given)
#pragma unroll
    for (int i = 0; i < kGivenRows; ++i)
      if (thread_index() + i * kConsumers < kRows)
        store_shared(share.base + kSquareSumsAt + (thread_index() + i * kConsumers) * 4, given[i]);
  // The ring is no longer read.
  sync_consumers();
  const int part = thread_index();
  if (kSplitK > 1 && part < kSplitK) barrier_arrive_at(of_cta(free_barrier(share), part * kMulticast + share.neighbour));
  leave_sums(share, sums);
  if (kSplitK > 1) {
    barrier_wait(free_barrier(share), 0);
    send_sums(share);
  }
  if (kSplitK > 1 || (kMulticast > 1 && sums_squares(sizes))) barrier_wait(sent_barrier(share), 0);
  // Own sums and squares are there.
  sync_consumers();
  if (kIsGated) {
    store_gated(share, sizes, out);
    return;
  }
  store(share, sizes, out, residual, befores);
  if (sizes.square_sums_out) {
    sync_consumers();
    store_square_sums(share, sizes);
  }
}

// Grid: cdiv(num_out, kColumns), to a multiple of kMulticast, x kSplitK, in clusters of kClusterCtas, at most 8; kSplitK at most
// the k blocks. w [num_out, num_in] in boxes [kTileN, kTileK], or gate and up [2 num_out, num_in] as load_gated_box says,
// in boxes of kTileN / 16 groups; x [num_rows, num_in] in boxes [kMulticastRows, kTileK]; both swizzled by 128 bytes. out and
// residual (or null, or out itself; null where gated) [num_rows, num_out]. Gated GEMMs only: eps
// of the deferred norm and square_sums (or null). Others: square_sums_out (or null).
KERNEL gemm_sm90(MAP_ARGUMENT w_map, MAP_ARGUMENT x_map, u16* out, const u16* residual, int num_rows, int num_out,
                 int num_in, int num_square_sums, float eps, const float* square_sums, float* square_sums_out) {
  // A CTA's number in its cluster is %cluster_ctarank too: clusters are consecutive CTAs of one axis.
  const int block = block_index(), rank = block % kClusterCtas, num_blocks = (num_in + kTileK - 1) / kTileK;
  Share share;
  share.base = (shared_base() + 1023) / 1024 * 1024;
  share.part = rank / kMulticast;
  share.neighbour = rank % kMulticast;
  share.tile = block / kClusterCtas * kMulticast + share.neighbour;
  share.first_block = num_blocks * share.part / kSplitK;
  share.num_blocks = num_blocks * (share.part + 1) / kSplitK - share.first_block;
  // Tiles that only fill a cluster are beyond the result.
  if (share.tile * kColumns >= num_out) square_sums_out = nullptr;
  const Sizes sizes = {num_rows, num_out, num_in, eps, square_sums, num_square_sums, square_sums_out};

  const bool is_producer = thread_index() == kConsumers;
  int early = 0;
  if (is_producer) early = begin(share, sizes, &w_map, &x_map);
  // Barriers are there for all that arrive at them.
  if (kClusterCtas > 1) cluster_arrive();
  sync_threads();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (kClusterCtas > 1) cluster_wait();
  if (is_producer) produce(share, &w_map, &x_map, early);
  if (thread_index() < kConsumers) consume(share, sizes, out, residual);
}
