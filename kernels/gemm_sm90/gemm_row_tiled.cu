// Row-tiled GEMM for Hopper (sm_90a), for more rows than gemm.cu: out[t, n] = sum_k x[t, k] w[n, k], optionally added to a
// residual. Rows of x are wgmma's A operand (64 of them a warpgroup), weights its B operand: a tile's columns are any
// multiple of 8, so that tiles are about as many as multiprocessors, and none has to share K.
//
// One tile of kTileRows rows and kTileN columns a CTA; kMulticast CTAs of a cluster have the same columns and neighbouring
// rows. Each loads a part of the columns' weights, which TMA multicasts to all of them. As in gemm.cu weights are
// prefetched before griddepcontrol.wait; activations and launch_dependents come after it.
//
// Constants set at compile time: kTileN (a multiple of 8 x kMulticast to 256), kGroups (1, 2: warpgroups, of 64 rows each),
// kStages, kIsHalf, kMinCtas, kMulticast (1, 2, 4), kMaxTurns; `wgmma` for kTileN.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kTileK = 64;  // Numbers: 128 bytes, a row of the swizzle atom.
constexpr int kTileRows = 64 * kGroups;
constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 32, kWarps = kConsumers / 32;
constexpr int kMulticastColumns = kTileN / kMulticast;
constexpr u32 kWeightBytes = kTileN * kTileK * 2;
constexpr u32 kRowBytes = kTileRows * kTileK * 2;
constexpr u32 kStageBytes = kRowBytes + kWeightBytes;  // Multiples of 1024, the swizzle's atom.
constexpr u32 kRingBytes = kStages * kStageBytes;
// Sums take the ring's place: [kTileRows][kPitch] float32. The pitch is 8 mod 32 words: the 4 rows x 4 pairs of columns
// that half a warp stores at a time fall into 32 banks.
constexpr int kPitch = kTileN + (40 - kTileN % 32) % 32;
// Behind them come sums of squares of pieces of 8 columns [kTileRows][piece].
constexpr int kRowPieces = kTileN / 8;
constexpr u32 kSquareSumsAt = kTileRows * kPitch * 4, kFinishBytes = kSquareSumsAt + kTileRows * kRowPieces * 4;
constexpr u32 kBarriersAt = kRingBytes > kFinishBytes ? kRingBytes : kFinishBytes;

// ptx.cuh stands here.

// square_sums_out: of the results' rows [tile of columns][num_rows], or null.
struct Sizes {
  int num_rows, num_out, num_blocks;
  float* square_sums_out;
};

// One CTA's place. neighbour: of kMulticast tiles of rows; row, column: the tile's first.
struct Place {
  u32 base;
  int neighbour, row, column;
};

DEVICE u32 rows_at(const Place& place, int stage) { return place.base + stage * kStageBytes; }
DEVICE u32 weights_at(const Place& place, int stage) { return rows_at(place, stage) + kRowBytes; }
DEVICE u32 full_barrier(const Place& place, int stage) { return place.base + kBarriersAt + stage * 8; }
DEVICE u32 empty_barrier(const Place& place, int stage) { return place.base + kBarriersAt + (kStages + stage) * 8; }

// Elements outside of the matrices are read as zeros, and are not stored.
DEVICE void load_weights(const Place& place, const TensorMap* map, int index, int stage) {
  const int first = place.neighbour * kMulticastColumns;
  const u32 to = weights_at(place, stage) + first * kTileK * 2, barrier = full_barrier(place, stage);
  if (kMulticast == 1) {
    load_box(to, map, index * kTileK, place.column, barrier, kEvictFirst);
  } else {
    load_multicast_box(to, map, index * kTileK, place.column + first, barrier, kEvictFirst, (u16)((1u << kMulticast) - 1));
  }
}

DEVICE void load_rows(const Place& place, const TensorMap* map, int index, int stage) {
  load_box(rows_at(place, stage), map, index * kTileK, place.row, full_barrier(place, stage), kEvictLast);
}

// Barriers of all stages, by one thread.
DEVICE void begin(const Place& place, const TensorMap* w_map, const TensorMap* x_map) {
  prefetch_map(w_map);
  prefetch_map(x_map);
  for (int stage = 0; stage < kStages; ++stage) {
    barrier_init(full_barrier(place, stage), 1);
    barrier_init(empty_barrier(place, stage), kWarps * kMulticast);
  }
  barrier_init_fence();
}

// Weight prefetch by one thread, before griddepcontrol.wait: fills the ring.
DEVICE int load_early(const Place& place, const Sizes& sizes, const TensorMap* w_map) {
  const int early = sizes.num_blocks < kStages ? sizes.num_blocks : kStages;
  for (int index = 0; index < early; ++index) {
    // Weights and rows complete one phase: the rows' bytes are expected though their loads are issued later.
    barrier_expect(full_barrier(place, index), kRowBytes + kWeightBytes);
    load_weights(place, w_map, index, index);
  }
  return early;
}

// The remaining loads, by one thread, after griddepcontrol.wait.
DEVICE void produce(const Place& place, const Sizes& sizes, const TensorMap* w_map, const TensorMap* x_map, int early) {
  for (int index = 0; index < early; ++index) load_rows(place, x_map, index, index);
  int stage = 0;
  u32 parity = 0;  // Of the phase that ends when the consumers release the stage for the first, second, ... time.
  for (int index = early; index < sizes.num_blocks; ++index) {
    barrier_wait(empty_barrier(place, stage), parity);
    barrier_expect(full_barrier(place, stage), kRowBytes + kWeightBytes);
    load_weights(place, w_map, index, stage);
    load_rows(place, x_map, index, stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// A warp's wgmmas that read the stage are over: with all warps' arrivals it is free.
DEVICE void release(const Place& place, int stage) {
  const int lane = thread_index() % 32;
  sync_warp();
  if (kMulticast == 1) {
    if (lane == 0) barrier_arrive(empty_barrier(place, stage));
  } else if (lane < kMulticast) {
    // Neighbours write weights into this CTA's stage too: each has to know that it is free.
    barrier_arrive_at(of_cta(empty_barrier(place, stage), lane));
  }
}

// D's fragment: number 4 j + 2 h + c of a thread is row 16 warp + lane / 4 + 8 h of its warpgroup and column
// 8 j + lane % 4 * 2 + c.
typedef float Sums[kTileN / 2];

DEVICE void multiply(const Place& place, const Sizes& sizes, Sums& sums) {
  const int group = thread_index() / 128;
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) sums[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) pin(sums[i]);
  int stage = 0, before = kStages - 1;
  u32 parity = 0;
  for (int index = 0; index < sizes.num_blocks; ++index) {
    barrier_wait(full_barrier(place, stage), parity);
    const u32 rows = rows_at(place, stage) + group * 64 * kTileK * 2, weights = weights_at(place, stage);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) wgmma(sums, descriptor(rows + k * 32), descriptor(weights + k * 32));
    wgmma_end();
    // The wgmmas before these are over. Nobody waits for stages that are not filled again.
    wgmma_wait<1>();
    if (index > 0 && index - 1 + kStages < sizes.num_blocks) release(place, before);
    before = stage;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) pin(sums[i]);
}

DEVICE void leave_sums(const Place& place, const Sums& sums) {
  const int thread = thread_index(), lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const u32 to = place.base + (row * kPitch + lane % 4 * 2) * 4;
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) store_two(to + (h * 8 * kPitch + j * 8) * 4, sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]);
}

// Results are stored 8 columns of a row at a time by each thread, kBatch such pieces at once, so that their loads overlap.
// num_out and each row's start are multiples of 8.
constexpr int kPieces = kTileRows * kRowPieces, kBatch = 4;

struct Piece {
  u32 from;
  u64 to;
  bool is_there;
};

DEVICE Piece piece_of(const Place& place, const Sizes& sizes, int turn) {
  const int index = turn * kConsumers + thread_index(), row = index / kRowPieces, column = index % kRowPieces * 8;
  Piece piece;
  piece.is_there = index < kPieces && place.row + row < sizes.num_rows && place.column + column < sizes.num_out;
  piece.from = place.base + (row * kPitch + column) * 4;
  piece.to = (u64)(place.row + row) * sizes.num_out + place.column + column;
  return piece;
}

struct Befores {
  uint4 at[kBatch];
};

DEVICE Befores load_residual(const Place& place, const Sizes& sizes, const u16* residual, int turn) {
  Befores befores;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const Piece piece = piece_of(place, sizes, turn + i);
    befores.at[i] = residual && piece.is_there ? *(const uint4*)(residual + piece.to) : uint4{0, 0, 0, 0};
  }
  return befores;
}

DEVICE void store(const Place& place, const Sizes& sizes, u16* out, const u16* residual, Befores befores) {
  for (int turn = 0; turn * kConsumers < kPieces; turn += kBatch) {
    const Befores nexts = load_residual(place, sizes, residual, turn + kBatch);
    float4 sums[kBatch][2];
    Piece pieces[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      pieces[i] = piece_of(place, sizes, turn + i);
      const u32 from = pieces[i].is_there ? pieces[i].from : place.base;
      sums[i][0] = load_own(from), sums[i][1] = load_own(from + 16);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float4 a = sums[i][0], b = sums[i][1];
      const uint4 before = befores.at[i];
      const uint4 packed = {pack(a.x + low(before.x), a.y + high(before.x)), pack(a.z + low(before.y), a.w + high(before.y)),
                            pack(b.x + low(before.z), b.y + high(before.z)), pack(b.z + low(before.w), b.w + high(before.w))};
      if (pieces[i].is_there) *(uint4*)(out + pieces[i].to) = packed;
      const int index = (turn + i) * kConsumers + thread_index();
      if (sizes.square_sums_out && index < kPieces) {
        const float sum = sum_of_squares(packed.x) + sum_of_squares(packed.y) + sum_of_squares(packed.z) + sum_of_squares(packed.w);
        store_shared(place.base + kSquareSumsAt + index * 4, pieces[i].is_there ? sum : 0.0f);
      }
    }
    befores = nexts;
  }
}

// Of the tile's columns.
DEVICE void store_square_sums(const Place& place, const Sizes& sizes) {
  const int row = thread_index();
  if (row >= kTileRows || place.row + row >= sizes.num_rows) return;
  float sum = 0.0f;
#pragma unroll
  for (int piece = 0; piece < kRowPieces; ++piece)
    sum += load_one(place.base + kSquareSumsAt + (row * kRowPieces + piece) * 4);
  sizes.square_sums_out[place.column / kTileN * sizes.num_rows + place.row + row] = sum;
}

// Grid: cdiv(num_out, kTileN) x cdiv(num_rows, kTileRows) to a multiple of kMulticast, tiles of rows next to each other, in
// clusters of kMulticast. w [num_out, num_in] in boxes [kMulticastColumns, kTileK]; x [num_rows, num_in] in boxes
// [kTileRows, kTileK]; both swizzled by 128 bytes. out and residual (or null, or out itself) [num_rows, num_out]. square_sums_out:
// as in gemm.cu. num_square_sums, eps and square_sums are unused: both kernels have one signature.
KERNEL gemm_sm90_row_tiled(MAP_ARGUMENT w_map, MAP_ARGUMENT x_map, u16* out, const u16* residual, int num_rows, int num_out,
                      int num_in, int num_square_sums, float eps, const float* square_sums, float* square_sums_out) {
  const Sizes sizes = {num_rows, num_out, (num_in + kTileK - 1) / kTileK, square_sums_out};
  const int num_row_tiles = ((num_rows + kTileRows - 1) / kTileRows + kMulticast - 1) / kMulticast * kMulticast;
  // A CTA's number in its cluster is %cluster_ctarank too: clusters are consecutive CTAs of one axis.
  const int block = block_index();
  Place place;
  place.base = (shared_base() + 1023) / 1024 * 1024;
  place.neighbour = block % kMulticast;
  place.row = block % num_row_tiles * kTileRows;
  place.column = block / num_row_tiles * kTileN;

  const bool is_producer = thread_index() == kConsumers;
  if (is_producer) begin(place, &w_map, &x_map);
  // Barriers are there for all that arrive at them, neighbours' boxes too.
  if (kMulticast > 1) {
    cluster_arrive();
    cluster_wait();
  }
  sync_threads();
  const int early = is_producer ? load_early(place, sizes, &w_map) : 0;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (is_producer) produce(place, sizes, &w_map, &x_map, early);
  if (thread_index() >= kConsumers) return;
  Sums sums;
  multiply(place, sizes, sums);
  const Befores befores = load_residual(place, sizes, residual, 0);
  // The ring is no longer read.
  sync_consumers();
  leave_sums(place, sums);
  sync_consumers();
  store(place, sizes, out, residual, befores);
  if (sizes.square_sums_out) {
    sync_consumers();
    store_square_sums(place, sizes);
  }
}
