// GEMM of up to 8 rows with weights that go from memory to the registers of mma without a barrier: out[t, n] = sum_k x[t, k]
// w[n, k], optionally added to a residual, optionally silu(gate) x up of rows that are RMS-normalised.
//
// A CTA has 16 * kTiles rows of the weight (gated: 8 of gate and the 8 of up beside them for each tile); its warps share K. The
// order along K is free as long as both operands have the same, so a thread's 16 bytes of a row are its part of two mma
// (m16n8k16) of other numbers of K than their own. Each thread copies such pieces to a ring in shared memory (cp.async), which
// it alone reads: kDepth slots are under way all the time, and nothing but a thread's own count of copies orders them. Loads
// into registers would do as well if they were waited for one by one, but compilers wait for all of them at the head of a loop.
// Weights are read once, as by a GEMV, whatever the number of rows; the ring is filled with them before griddepcontrol.wait.
// Sums of the warps are added in one order.
//
// Tried and dropped, slower at 5 rows on an H200: weights behind the ring asked for into the L2 cache before the wait; and CTAs
// that take several tiles in turn, half as many as fit, so that the next kernel's are there as well: wherever the CTAs of the
// kernel ahead end first, an SM gets two of them, and another one none.
//
// Constants set at compile time: kWarps, kTiles, kDepth, kBatch, kMinCtas, kIsGated, kIsHalf (or bfloat16), kMaxPolls (unused);
// for an emulation on a CPU, EMULATED with the primitives. K is a multiple of 32 * kWarps * kBatch.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kThreads = 32 * kWarps, kConsumers = kThreads;
constexpr int kRows = 8;                                     // Rows of x, padded.
constexpr int kTileRows = 16 * kTiles;                       // Weight rows of a CTA.
constexpr int kColumns = kIsGated ? 8 * kTiles : kTileRows;  // Features out of it.
constexpr int kSlotNumbers = 32 * kWarps * kBatch;           // Numbers of K of a slot of all warps.
constexpr int kPitch = kTileRows + 4;                        // Sums of a row of x: lanes of a warp write to different banks.
// Pieces of 16 bytes of a thread and block of 32 numbers: of weight rows g and g + 8 of each tile, then of a row of x.
constexpr int kPieces = 2 * kTiles + 1;
constexpr u32 kSlotBytes = kBatch * kPieces * kThreads * 16;

// ptx.cuh stands here.

#ifndef EMULATED

DEVICE void copy_weight(u32 to, const u16* from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(kEvictFirst)
               : "memory");
}

// Zeros, and nothing is read, where there is no such row.
DEVICE void copy_row(u32 to, const u16* from, bool is_row) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_row ? 16 : 0) : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until no more than so many of the thread's groups are under way.
template <int kLeft>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

DEVICE void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (kIsHalf) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

#endif  // EMULATED

// A thread's place in a CTA's work. ring: of its own pieces.
struct Place {
  u32 ring;
  int warp, lane;
};

DEVICE u32 piece_at(const Place& place, int slot, int block, int piece) {
  return place.ring + slot * kSlotBytes + (block * kPieces + piece) * kThreads * 16;
}

// Where a thread's numbers of a block begin, of those of a slot: warps take runs of kBatch blocks in turn.
DEVICE int number_at(const Place& place, int block) { return (place.warp * kBatch + block) * 32 + (place.lane & 3) * 8; }

// The weight rows of a thread: the first, and how far it is to the second of a tile, and to the first of the next tile.
struct Weights {
  const u16* first;
  u64 second_at, tile_at;
};

// A step has a slot's numbers of K.
DEVICE void copy_weights(const Place& place, int slot, int step, const Weights& weights) {
#pragma unroll
  for (int block = 0; block < kBatch; ++block) {
    const u16* at = weights.first + step * kSlotNumbers + number_at(place, block);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      copy_weight(piece_at(place, slot, block, 2 * tile), at + tile * weights.tile_at);
      copy_weight(piece_at(place, slot, block, 2 * tile + 1), at + tile * weights.tile_at + weights.second_at);
    }
  }
}

DEVICE void copy_rows(const Place& place, int slot, int step, const u16* row, bool is_row) {
#pragma unroll
  for (int block = 0; block < kBatch; ++block)
    copy_row(piece_at(place, slot, block, kPieces - 1), row + step * kSlotNumbers + number_at(place, block), is_row);
}

DEVICE void consume(const Place& place, int slot, float (&sums)[kTiles][4], float& squares) {
#pragma unroll
  for (int block = 0; block < kBatch; ++block) {
    const uint4 r = load_shared(piece_at(place, slot, block, kPieces - 1));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 a = load_shared(piece_at(place, slot, block, 2 * tile));
      const uint4 b = load_shared(piece_at(place, slot, block, 2 * tile + 1));
      multiply(sums[tile], a.x, b.x, a.y, b.y, r.x, r.y);
      multiply(sums[tile], a.z, b.z, a.w, b.w, r.z, r.w);
    }
    if (kIsGated) squares += sum_of_squares(r.x) + sum_of_squares(r.y) + sum_of_squares(r.z) + sum_of_squares(r.w);
  }
}

// Grid: num_out / kColumns. eps: of gated GEMMs, negative if rows are not normed.
KERNEL few_rows(MAP_ARGUMENT weight_map, MAP_ARGUMENT row_map, const u16* weight, const u16* x, u16* out,
                const u16* residual, int num_rows, int num_out, int num_in, float eps) {
  __shared__ float sums_of[kWarps][kRows * kPitch];
  __shared__ float squares_of[kWarps][kRows];
  const int thread = thread_index(), lane = thread & 31, warp = thread >> 5, group = lane >> 2;
  const int first_column = block_index() * kColumns, num_steps = num_in / kSlotNumbers;
  const u64 second_at = (u64)(kIsGated ? num_out : 8) * num_in, tile_at = (u64)(kIsGated ? 8 : 16) * num_in;
  const Weights weights = {weight + (u64)(first_column + group) * num_in, second_at, tile_at};
  const bool is_row = group < num_rows;
  const u16* row = is_row ? x + (u64)group * num_in : x;
  const Place place = {shared_base() + thread * 16, warp, lane};
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot)
    if (slot < num_steps) copy_weights(place, slot, slot, weights);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  // A group for each slot, also where K has fewer steps; the first one has all weights so far.
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) {
    if (slot < num_steps) copy_rows(place, slot, slot, row, is_row);
    commit_copies();
  }
  float sums[kTiles][4] = {}, squares = 0.0f;
  int slot = 0;
#pragma unroll 2
  for (int step = 0; step < num_steps; ++step) {
    wait_for_copies<kDepth - 1>();
    consume(place, slot, sums, squares);
    if (step + kDepth < num_steps) {
      copy_weights(place, slot, step + kDepth, weights);
      copy_rows(place, slot, step + kDepth, row, is_row);
    }
    // Without copies too: the count of groups goes on.
    commit_copies();
    slot = slot + 1 == kDepth ? 0 : slot + 1;
  }
  // A thread has weight rows g and g + 8 for rows 2 (lane % 4) and the next of x.
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int part = 0; part < 4; ++part)
      sums_of[warp][(2 * (lane & 3) + part % 2) * kPitch + tile * 16 + part / 2 * 8 + group] = sums[tile][part];
  if (kIsGated) {
    squares += shuffle_xor(squares, 1);
    squares += shuffle_xor(squares, 2);
    if ((lane & 3) == 0) squares_of[warp][group] = squares;
  }
  // What is added to is asked for ahead of the wait for other warps.
  constexpr int kOutputs = (kRows * kColumns + kThreads - 1) / kThreads;
  u32 before[kOutputs];
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    const int index = thread + i * kThreads, at_row = index / kColumns;
    before[i] = 0;
    if (!kIsGated && residual && at_row < num_rows)
      before[i] = residual[(u64)at_row * num_out + first_column + index % kColumns];
  }
  sync_threads();
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    const int index = thread + i * kThreads, at_row = index / kColumns, column = index % kColumns;
    if (at_row >= num_rows) continue;
    const int at = at_row * kPitch + (kIsGated ? column / 8 * 16 + column % 8 : column);
    float result = 0.0f, up = 0.0f, square = 0.0f;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      result += sums_of[part][at];
      if (kIsGated) {
        up += sums_of[part][at + 8];
        square += squares_of[part][at_row];
      }
    }
    if (kIsGated) {
      const float scale = eps < 0.0f ? 1.0f : reciprocal_root(square / num_in + eps);
      result = silu(result * scale) * (up * scale);
    } else {
      result += low(before[i]);
    }
    out[(u64)at_row * num_out + first_column + column] = (u16)pack(result, 0.0f);
  }
}
