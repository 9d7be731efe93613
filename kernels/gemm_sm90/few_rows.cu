// GEMM of up to 8 rows with weights that go from memory straight into the registers of mma: out[t, n] = sum_k x[t, k] w[n, k],
// optionally added to a residual, optionally silu(gate) x up of rows that are RMS-normalised.
//
// A CTA computes passes of 16 * kTiles rows of the weight (gated: 8 of gate and the 8 of up beside them for each tile); its
// warps share K. Neither operand passes through shared memory: the order along K is free as long as both have the same,
// so a thread loads 16 bytes of a row, which are its part of two mma (m16n8k16) of other numbers of K than their own.
// Weights are read once, as by a GEMV, whatever the number of rows. Each thread has kDepth slots of kBatch blocks of
// loads under way all the time, over the ends of passes too. Sums of the warps are added in one order.
//
// Weight prefetch under PDL: the first slots are loaded before griddepcontrol.wait, and num_early bytes behind them of each
// weight row are asked for into the L2 cache. A grid of no more CTAs than leave room for as many of the next kernel has
// that kernel do so while this one still computes.
//
// Constants set at compile time: kWarps, kTiles, kDepth, kBatch, kMinCtas, kIsGated, kIsHalf (or bfloat16), kMaxPolls (unused); for an emulation on a CPU, EMULATED with the primitives. K is a multiple of
// 32 * kWarps * kBatch * kDepth.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kThreads = 32 * kWarps, kConsumers = kThreads;
constexpr int kRows = 8;                               // Rows of x, padded.
constexpr int kTileRows = 16 * kTiles;                 // Weight rows of a pass.
constexpr int kColumns = kIsGated ? 8 * kTiles : kTileRows;  // Features out of a pass.
constexpr int kSlotNumbers = 32 * kWarps * kBatch;     // Numbers of K of a slot of all warps.
constexpr int kChunkNumbers = kSlotNumbers * kDepth;   // Of all slots.
constexpr int kPitch = kTileRows + 4;                  // Sums of a row of x: lanes of a warp write to different banks.

// ptx.cuh stands here.

struct Slot {
  uint4 first[kBatch][kTiles], second[kBatch][kTiles];  // Of weight rows g and g + 8 of each tile.
  uint4 row[kBatch];
};

#ifndef EMULATED

DEVICE uint4 load_weight(const u16* at) {
  uint4 part;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(part.x), "=r"(part.y), "=r"(part.z), "=r"(part.w)
               : "l"(at), "l"(kEvictFirst)
               : "memory");
  return part;
}

DEVICE uint4 load_row(const u16* at) {
  uint4 part;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(part.x), "=r"(part.y), "=r"(part.z), "=r"(part.w)
               : "l"(at)
               : "memory");
  return part;
}

// Into the L2 cache; bytes: a multiple of 16.
DEVICE void prefetch_weights(const u16* at, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
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

// Where a thread's numbers of a block begin, within a chunk: warps take runs of kBatch blocks in turn.
DEVICE int number_at(int warp, int lane, int slot, int block) {
  return slot * kSlotNumbers + (warp * kBatch + block) * 32 + (lane & 3) * 8;
}

// second_at, tile_at: numbers from a tile's first row of a thread to its second, and to the first of the next tile.
DEVICE void load_weights(Slot& slot, int index, const u16* weights, int second_at, int tile_at, int warp, int lane) {
#pragma unroll
  for (int block = 0; block < kBatch; ++block) {
    const u16* at = weights + number_at(warp, lane, index, block);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      slot.first[block][tile] = load_weight(at + (u64)tile * tile_at);
      slot.second[block][tile] = load_weight(at + (u64)tile * tile_at + second_at);
    }
  }
}

DEVICE void load_rows(Slot& slot, int index, const u16* row, bool is_row, int warp, int lane) {
#pragma unroll
  for (int block = 0; block < kBatch; ++block)
    slot.row[block] = is_row ? load_row(row + number_at(warp, lane, index, block)) : make_uint4(0, 0, 0, 0);
}

DEVICE void consume(const Slot& slot, float (&sums)[kTiles][4], float& squares, bool is_squared) {
#pragma unroll
  for (int block = 0; block < kBatch; ++block) {
    const uint4 r = slot.row[block];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 a = slot.first[block][tile], b = slot.second[block][tile];
      multiply(sums[tile], a.x, b.x, a.y, b.y, r.x, r.y);
      multiply(sums[tile], a.z, b.z, a.w, b.w, r.z, r.w);
    }
    if (is_squared) squares += sum_of_squares(r.x) + sum_of_squares(r.y) + sum_of_squares(r.z) + sum_of_squares(r.w);
  }
}

// Grid: num_ctas, up to num_out / kColumns, which take passes in turn. num_early: a multiple of 16.
KERNEL few_rows(MAP_ARGUMENT weight_map, MAP_ARGUMENT row_map, const u16* weight, const u16* x, u16* out,
                const u16* residual, int num_rows, int num_out, int num_in, float eps, int num_ctas,
                int num_early) {
  // Sums of odd and of even passes: while some threads finish a pass, others are in the next.
  __shared__ float sums_of[2][kWarps][kRows * kPitch];
  __shared__ float squares_of[kWarps][kRows];
  const int thread = thread_index(), lane = thread & 31, warp = thread >> 5, group = lane >> 2;
  const int num_passes = num_out / kColumns, num_chunks = num_in / kChunkNumbers;
  const int second_at = (kIsGated ? num_out : 8) * num_in, tile_at = (kIsGated ? 8 : 16) * num_in;
  const u16* weights = weight + (u64)(block_index() * kColumns + group) * num_in;
  const u16* row = x + (u64)group * num_in;
  const bool is_row = group < num_rows, is_normed = kIsGated && eps >= 0.0f;
  Slot slots[kDepth];
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) load_weights(slots[slot], slot, weights, second_at, tile_at, warp, lane);
  if (num_early && num_in > kChunkNumbers && thread < kTileRows) {
    const int of_tile = thread % 16, left = 2 * (num_in - kChunkNumbers);
    const int weight_row = block_index() * kColumns + (kIsGated ? thread / 16 * 8 + of_tile % 8 : thread);
    const u64 half = kIsGated && of_tile >= 8 ? num_out : 0;
    prefetch_weights(weight + (weight_row + half) * num_in + kChunkNumbers, left < num_early ? left : num_early);
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) load_rows(slots[slot], slot, row, is_row, warp, lane);
  float squares = 0.0f;
  for (int pass = block_index(), turn = 0; pass < num_passes; pass += num_ctas, turn ^= 1) {
    float sums[kTiles][4] = {};
    const bool is_squared = is_normed && pass == block_index();
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      const bool is_last = chunk + 1 == num_chunks, has_next = !is_last || pass + num_ctas < num_passes;
      weights += is_last ? (u64)num_ctas * kColumns * num_in - (num_in - kChunkNumbers) : kChunkNumbers;
      const u16* next_row = is_last ? row : row + (chunk + 1) * kChunkNumbers;
#pragma unroll
      for (int slot = 0; slot < kDepth; ++slot) {
        consume(slots[slot], sums, squares, is_squared);
        if (has_next) {
          load_weights(slots[slot], slot, weights, second_at, tile_at, warp, lane);
          load_rows(slots[slot], slot, next_row, is_row, warp, lane);
        }
      }
    }
    // A thread has weight rows g and g + 8 for rows 2 (lane % 4) and the next of x.
    float* own = sums_of[turn][warp];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int part = 0; part < 4; ++part)
        own[(2 * (lane & 3) + part % 2) * kPitch + tile * 16 + part / 2 * 8 + group] = sums[tile][part];
    if (is_squared) {
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
        before[i] = residual[(u64)at_row * num_out + pass * kColumns + index % kColumns];
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
        result += sums_of[turn][part][at];
        if (kIsGated) {
          up += sums_of[turn][part][at + 8];
          square += squares_of[part][at_row];
        }
      }
      if (kIsGated) {
        const float scale = is_normed ? reciprocal_root(square / num_in + eps) : 1.0f;
        result = silu(result * scale) * (up * scale);
      } else {
        result += low(before[i]);
      }
      out[(u64)at_row * num_out + pass * kColumns + column] = (u16)pack(result, 0.0f);
    }
  }
}
