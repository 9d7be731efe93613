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
// kIsHalf, kMinCtas, kSplitK, kMulticast (1, 2, 4; kRows a multiple of 8 times as many), kMaxPolls; `wgmma` for kRows.

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

// One CTA's tile, and its k blocks. part: of kSplitK of K; neighbour: of kMulticast tiles.
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

// gemm_results.cuh stands here.
// Work of the warpgroups after griddepcontrol.wait.
DEVICE void consume(const Share& share, const Sizes& sizes, u16* out, const u16* residual) {
  Sums sums;
  float row_square_sums[kSquareRows], given[kGivenRows];
  const bool is_given = kIsGated && sizes.square_sums;
  if (is_given) load_square_sums(sizes, given);
  multiply(share, sizes, sums, row_square_sums);
  Residuals residuals;
  if (!kIsGated) residuals = load_residual(share, sizes, residual, thread_index() / 32);
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
  store(share, sizes, out, residual, residuals);
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
