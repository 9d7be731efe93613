// GEMM of up to 8 rows with weights that go from memory to the registers of mma without a barrier: out[t, n] = sum_k x[t, k]
// w[n, k], optionally added to a residual, optionally silu(gate) x up of rows that are RMS-normalised.
//
// A CTA computes passes of 16 * kTiles rows of the weight (gated: 8 of gate and the 8 of up beside them for each tile); its
// warps share K. The order along K is free as long as both operands have the same, so a thread's 16 bytes of a row are its
// part of two mma (m16n8k16) of other numbers of K than their own. Each thread copies such pieces to a ring in shared memory
// (cp.async), which it alone reads: kDepth slots are under way all the time, over the ends of passes too, and nothing but a
// thread's own count of copies orders them. Loads into registers would do as well if they were waited for one by one, but
// compilers wait for all of them at the head of a loop. Weights are read once, as by a GEMV, whatever the number of rows.
// Sums of the warps are added in one order.
//
// Weight prefetch under PDL: the ring is filled before griddepcontrol.wait, and num_early bytes behind it of each weight row
// are asked for into the L2 cache. A grid of no more CTAs than leave room for as many of the next kernel has that kernel do so
// while this one still computes.
//
// Constants set at compile time: kWarps, kTiles, kDepth, kBatch, kMinCtas, kIsGated, kIsHalf (or bfloat16), kMaxPolls (unused);
// for an emulation on a CPU, EMULATED with the primitives. K is a multiple of 32 * kWarps * kBatch.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kThreads = 32 * kWarps, kConsumers = kThreads;
constexpr int kRows = 8;                                     // Rows of x, padded.
constexpr int kTileRows = 16 * kTiles;                       // Weight rows of a pass.
constexpr int kColumns = kIsGated ? 8 * kTiles : kTileRows;  // Features out of a pass.
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

// Sizes of the GEMM. second_at, tile_at: numbers from a tile's first weight row of a thread to its second, and to the first of
// the next tile.
struct Sizes {
  int num_passes, num_steps, num_ctas;
  u64 second_at, tile_at, pass_at;
};

// What a thread copies next: a step has a slot's numbers of K. weights: of the thread's first row of the pass.
struct Cursor {
  int pass, step;
  const u16* weights;
};

DEVICE void advance(Cursor& cursor, const Sizes& sizes) {
  if (++cursor.step == sizes.num_steps) {
    cursor.step = 0;
    cursor.pass += sizes.num_ctas;
    cursor.weights += sizes.pass_at;
  }
}

DEVICE void copy_weights(const Place& place, int slot, const Cursor& cursor, const Sizes& sizes) {
  if (cursor.pass >= sizes.num_passes) return;
#pragma unroll
  for (int block = 0; block < kBatch; ++block) {
    const u16* at = cursor.weights + cursor.step * kSlotNumbers + number_at(place, block);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      copy_weight(piece_at(place, slot, block, 2 * tile), at + tile * sizes.tile_at);
      copy_weight(piece_at(place, slot, block, 2 * tile + 1), at + tile * sizes.tile_at + sizes.second_at);
    }
  }
}

DEVICE void copy_rows(const Place& place, int slot, const Cursor& cursor, const Sizes& sizes, const u16* row, bool is_row) {
  if (cursor.pass >= sizes.num_passes) return;
#pragma unroll
  for (int block = 0; block < kBatch; ++block)
    copy_row(piece_at(place, slot, block, kPieces - 1), row + cursor.step * kSlotNumbers + number_at(place, block), is_row);
}

DEVICE void consume(const Place& place, int slot, float (&sums)[kTiles][4], float& squares, bool is_squared) {
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
  const u64 second_at = (u64)(kIsGated ? num_out : 8) * num_in, tile_at = (u64)(kIsGated ? 8 : 16) * num_in;
  const Sizes sizes = {num_out / kColumns, num_in / kSlotNumbers, num_ctas, second_at, tile_at, (u64)num_ctas * kColumns * num_in};
  const Cursor first = {(int)block_index(), 0, weight + (u64)(block_index() * kColumns + group) * num_in};
  const bool is_row = group < num_rows, is_normed = kIsGated && eps >= 0.0f;
  const u16* row = is_row ? x + (u64)group * num_in : x;
  const Place place = {shared_base() + thread * 16, warp, lane};
  Cursor cursor = first;
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) {
    copy_weights(place, slot, cursor, sizes);
    advance(cursor, sizes);
  }
  const int left = 2 * (num_in - kDepth * kSlotNumbers);
  if (num_early && left > 0 && thread < kTileRows) {
    const int of_tile = thread % 16;
    const int weight_row = block_index() * kColumns + (kIsGated ? thread / 16 * 8 + of_tile % 8 : thread);
    const u64 half = kIsGated && of_tile >= 8 ? num_out : 0;
    prefetch_weights(weight + (weight_row + half) * num_in + kDepth * kSlotNumbers, left < num_early ? left : num_early);
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  cursor = first;
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) {
    copy_rows(place, slot, cursor, sizes, row, is_row);
    commit_copies();
    advance(cursor, sizes);
  }
  float squares = 0.0f;
  int slot = 0;
  for (int pass = block_index(), turn = 0; pass < sizes.num_passes; pass += num_ctas, turn ^= 1) {
    float sums[kTiles][4] = {};
    const bool is_squared = is_normed && pass == block_index();
#pragma unroll 2
    for (int step = 0; step < sizes.num_steps; ++step) {
      wait_for_copies<kDepth - 1>();
      consume(place, slot, sums, squares, is_squared);
      copy_weights(place, slot, cursor, sizes);
      copy_rows(place, slot, cursor, sizes, row, is_row);
      // Without copies too: the count of groups goes on.
      commit_copies();
      advance(cursor, sizes);
      slot = slot + 1 == kDepth ? 0 : slot + 1;
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
