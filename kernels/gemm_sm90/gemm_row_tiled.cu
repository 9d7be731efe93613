// Row-tiled GEMM for Hopper (sm_90a), for more rows than gemm.cu: out[t, n] = sum_k x[t, k] w[n, k], optionally added to a
// residual. Rows of x are wgmma's A operand (64 of them a warpgroup), weights its B operand: a tile's columns are any
// multiple of 8, so that tiles are about as many as multiprocessors, and none has to share K.
//
// One tile of kTileRows rows and kTileN columns a CTA; kMulticast CTAs of a cluster have the same columns and neighbouring
// rows. Each loads a part of the columns' weights, which TMA multicasts to all of them. As in gemm.cu weights are
// prefetched before griddepcontrol.wait; activations and launch_dependents come after it.
//
// Constants set at compile time: kTileN (a multiple of 8 x kMulticast to 256), kGroups (1, 2: warpgroups, of 64 rows each),
// kStages, kIsHalf, kMinCtas, kMulticast (1, 2, 4), kMaxPolls; `wgmma` for kTileN.

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

// One CTA's tile. base: of its shared memory; neighbour: of kMulticast tiles of rows; row, column: the tile's first.
struct CtaTile {
  u32 base;
  int neighbour, row, column;
};

DEVICE u32 rows_at(const CtaTile& cta, int stage) { return cta.base + stage * kStageBytes; }
DEVICE u32 weights_at(const CtaTile& cta, int stage) { return rows_at(cta, stage) + kRowBytes; }
DEVICE u32 full_barrier(const CtaTile& cta, int stage) { return cta.base + kBarriersAt + stage * 8; }
DEVICE u32 empty_barrier(const CtaTile& cta, int stage) { return cta.base + kBarriersAt + (kStages + stage) * 8; }

// Elements outside of the matrices are read as zeros, and are not stored.
DEVICE void load_weights(const CtaTile& cta, const TensorMap* map, int index, int stage) {
  const int first = cta.neighbour * kMulticastColumns;
  const u32 to = weights_at(cta, stage) + first * kTileK * 2, barrier = full_barrier(cta, stage);
  if (kMulticast == 1) {
    load_box(to, map, index * kTileK, cta.column, barrier, kEvictFirst);
  } else {
    load_multicast_box(to, map, index * kTileK, cta.column + first, barrier, kEvictFirst, (u16)((1u << kMulticast) - 1));
  }
}

DEVICE void load_rows(const CtaTile& cta, const TensorMap* map, int index, int stage) {
  load_box(rows_at(cta, stage), map, index * kTileK, cta.row, full_barrier(cta, stage), kEvictLast);
}

// Barriers of all stages, by one thread.
DEVICE void begin(const CtaTile& cta, const TensorMap* w_map, const TensorMap* x_map) {
  prefetch_map(w_map);
  prefetch_map(x_map);
  for (int stage = 0; stage < kStages; ++stage) {
    barrier_init(full_barrier(cta, stage), 1);
    barrier_init(empty_barrier(cta, stage), kWarps * kMulticast);
  }
  barrier_init_fence();
}

// Weight prefetch by one thread, before griddepcontrol.wait: fills the ring.
DEVICE int load_early(const CtaTile& cta, const Sizes& sizes, const TensorMap* w_map) {
  const int early = sizes.num_blocks < kStages ? sizes.num_blocks : kStages;
  for (int index = 0; index < early; ++index) {
    // Weights and rows complete one phase: the rows' bytes are expected though their loads are issued later.
    barrier_expect(full_barrier(cta, index), kRowBytes + kWeightBytes);
    load_weights(cta, w_map, index, index);
  }
  return early;
}

// The remaining loads, by one thread, after griddepcontrol.wait.
DEVICE void produce(const CtaTile& cta, const Sizes& sizes, const TensorMap* w_map, const TensorMap* x_map, int early) {
  for (int index = 0; index < early; ++index) load_rows(cta, x_map, index, index);
  int stage = 0;
  u32 parity = 0;  // Of the phase that ends when the consumers release the stage for the first, second, ... time.
  for (int index = early; index < sizes.num_blocks; ++index) {
    barrier_wait(empty_barrier(cta, stage), parity);
    barrier_expect(full_barrier(cta, stage), kRowBytes + kWeightBytes);
    load_weights(cta, w_map, index, stage);
    load_rows(cta, x_map, index, stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// A warp's wgmmas that read the stage are over: with all warps' arrivals it is free.
DEVICE void release(const CtaTile& cta, int stage) {
  const int lane = thread_index() % 32;
  sync_warp();
  if (kMulticast == 1) {
    if (lane == 0) barrier_arrive(empty_barrier(cta, stage));
  } else if (lane < kMulticast) {
    // Neighbours write weights into this CTA's stage too: each has to know that it is free.
    barrier_arrive_at(of_cta(empty_barrier(cta, stage), lane));
  }
}

// D's fragment: number 4 j + 2 h + c of a thread is row 16 warp + lane / 4 + 8 h of its warpgroup and column
// 8 j + lane % 4 * 2 + c.
typedef float Sums[kTileN / 2];

DEVICE void multiply(const CtaTile& cta, const Sizes& sizes, Sums& sums) {
  const int group = thread_index() / 128;
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) sums[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < kTileN / 2; ++i) pin(sums[i]);
  int stage = 0, before = kStages - 1;
  u32 parity = 0;
  for (int index = 0; index < sizes.num_blocks; ++index) {
    barrier_wait(full_barrier(cta, stage), parity);
    const u32 rows = rows_at(cta, stage) + group * 64 * kTileK * 2, weights = weights_at(cta, stage);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) wgmma(sums, descriptor(rows + k * 32), descriptor(weights + k * 32));
    wgmma_end();
    // The wgmmas before these are over. Nobody waits for stages that are not filled again.
    wgmma_wait<1>();
    if (index > 0 && index - 1 + kStages < sizes.num_blocks) release(cta, before);
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

DEVICE void leave_sums(const CtaTile& cta, const Sums& sums) {
  const int thread = thread_index(), lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const u32 to = cta.base + (row * kPitch + lane % 4 * 2) * 4;
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

DEVICE Piece piece_of(const CtaTile& cta, const Sizes& sizes, int step) {
  const int index = step * kConsumers + thread_index(), row = index / kRowPieces, column = index % kRowPieces * 8;
  Piece piece;
  piece.is_there = index < kPieces && cta.row + row < sizes.num_rows && cta.column + column < sizes.num_out;
  piece.from = cta.base + (row * kPitch + column) * 4;
  piece.to = (u64)(cta.row + row) * sizes.num_out + cta.column + column;
  return piece;
}

struct Residuals {
  uint4 at[kBatch];
};

DEVICE Residuals load_residual(const CtaTile& cta, const Sizes& sizes, const u16* residual, int step) {
  Residuals residuals;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const Piece piece = piece_of(cta, sizes, step + i);
    residuals.at[i] = residual && piece.is_there ? *(const uint4*)(residual + piece.to) : uint4{0, 0, 0, 0};
  }
  return residuals;
}

DEVICE void store(const CtaTile& cta, const Sizes& sizes, u16* out, const u16* residual, Residuals residuals) {
  for (int step = 0; step * kConsumers < kPieces; step += kBatch) {
    const Residuals next_residuals = load_residual(cta, sizes, residual, step + kBatch);
    float4 sums[kBatch][2];
    Piece pieces[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      pieces[i] = piece_of(cta, sizes, step + i);
      const u32 from = pieces[i].is_there ? pieces[i].from : cta.base;
      sums[i][0] = load_own(from), sums[i][1] = load_own(from + 16);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float4 a = sums[i][0], b = sums[i][1];
      const uint4 before = residuals.at[i];
      const uint4 packed = {pack(a.x + low(before.x), a.y + high(before.x)), pack(a.z + low(before.y), a.w + high(before.y)),
                            pack(b.x + low(before.z), b.y + high(before.z)), pack(b.z + low(before.w), b.w + high(before.w))};
      if (pieces[i].is_there) *(uint4*)(out + pieces[i].to) = packed;
      const int index = (step + i) * kConsumers + thread_index();
      if (sizes.square_sums_out && index < kPieces) {
        const float sum = sum_of_squares(packed.x) + sum_of_squares(packed.y) + sum_of_squares(packed.z) + sum_of_squares(packed.w);
        store_shared(cta.base + kSquareSumsAt + index * 4, pieces[i].is_there ? sum : 0.0f);
      }
    }
    residuals = next_residuals;
  }
}

// Of the tile's columns.
DEVICE void store_square_sums(const CtaTile& cta, const Sizes& sizes) {
  const int row = thread_index();
  if (row >= kTileRows || cta.row + row >= sizes.num_rows) return;
  float sum = 0.0f;
#pragma unroll
  for (int piece = 0; piece < kRowPieces; ++piece)
    sum += load_one(cta.base + kSquareSumsAt + (row * kRowPieces + piece) * 4);
  sizes.square_sums_out[cta.column / kTileN * sizes.num_rows + cta.row + row] = sum;
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
  CtaTile cta;
  cta.base = (shared_base() + 1023) / 1024 * 1024;
  cta.neighbour = block % kMulticast;
  cta.row = block % num_row_tiles * kTileRows;
  cta.column = block / num_row_tiles * kTileN;

  const bool is_producer = thread_index() == kConsumers;
  if (is_producer) begin(cta, &w_map, &x_map);
  // Barriers are there for all that arrive at them, neighbours' boxes too.
  if (kMulticast > 1) {
    cluster_arrive();
    cluster_wait();
  }
  sync_threads();
  const int early = is_producer ? load_early(cta, sizes, &w_map) : 0;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (is_producer) produce(cta, sizes, &w_map, &x_map, early);
  if (thread_index() >= kConsumers) return;
  Sums sums;
  multiply(cta, sizes, sums);
  const Residuals residuals = load_residual(cta, sizes, residual, 0);
  // The ring is no longer read.
  sync_consumers();
  leave_sums(cta, sums);
  sync_consumers();
  store(cta, sizes, out, residual, residuals);
  if (sizes.square_sums_out) {
    sync_consumers();
    store_square_sums(cta, sizes);
  }
}
