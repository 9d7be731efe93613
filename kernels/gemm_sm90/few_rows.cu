// GEMM of up to 8 rows with weights that go from memory straight into the registers of mma: out[t, n] = sum_k x[t, k] w[n, k],
// optionally added to a residual, optionally silu(gate) x up of rows that are RMS-normalised.
//
// A CTA has 16 rows of the weight (gated: 8 of gate and the 8 of up beside them), whose K its warps share. Neither operand
// passes through shared memory: the order along K is free as long as both have the same, so a thread loads 16 bytes of
// a row, which are its part of two mma (m16n8k16) of other numbers of K than their own. Weights are read once, as by a
// GEMV, whatever the number of rows; those of the first batch are on their way before griddepcontrol.wait. Sums of the
// warps are added in one order.
//
// Constants set at compile time: kIsGated, kIsHalf (or bfloat16), kMinCtas, kMaxPolls (unused); for an
// emulation on a CPU, EMULATED with the primitives. K is a multiple of 1,024.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kWarps = 8, kThreads = 32 * kWarps, kConsumers = kThreads;
constexpr int kRows = 8, kColumns = kIsGated ? 8 : 16;  // Rows of x, padded; features out of a CTA.
constexpr int kBatch = 4;                               // Blocks of 32 numbers of K that a warp loads at a time.

// ptx.cuh stands here.

struct Parts {
  uint4 first[kBatch], second[kBatch];  // Of weight rows g and g + 8.
};

#ifndef EMULATED

DEVICE uint4 load_weight(const u16* at) {
  uint4 part;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(part.x), "=r"(part.y), "=r"(part.z), "=r"(part.w)
               : "l"(at)
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

// Where the numbers of a batch begin: warps take blocks in turn, so that together they read 512 bytes of a row.
DEVICE int number_at(int warp, int lane, int batch, int block) {
  return ((batch * kBatch + block) * kWarps + warp) * 32 + (lane & 3) * 8;
}

DEVICE void load(Parts& parts, const u16* first, const u16* second, int warp, int lane, int batch) {
#pragma unroll
  for (int block = 0; block < kBatch; ++block) {
    const int at = number_at(warp, lane, batch, block);
    parts.first[block] = load_weight(first + at);
    parts.second[block] = load_weight(second + at);
  }
}

DEVICE void consume(const Parts& parts, const u16* x, bool is_row, int warp, int lane, int batch, float (&sums)[4], float& squares) {
  uint4 rows[kBatch];
#pragma unroll
  for (int block = 0; block < kBatch; ++block) {
    rows[block] = is_row ? load_row(x + number_at(warp, lane, batch, block)) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int block = 0; block < kBatch; ++block) {
    const uint4 a = parts.first[block], b = parts.second[block], r = rows[block];
    multiply(sums, a.x, b.x, a.y, b.y, r.x, r.y);
    multiply(sums, a.z, b.z, a.w, b.w, r.z, r.w);
    if (kIsGated) squares += sum_of_squares(r.x) + sum_of_squares(r.y) + sum_of_squares(r.z) + sum_of_squares(r.w);
  }
}

KERNEL few_rows(MAP_ARGUMENT weight_map, MAP_ARGUMENT row_map, const u16* weight, const u16* x, u16* out,
                const u16* residual, int num_rows, int num_out, int num_in, float eps) {
  __shared__ float sums_of[kWarps][16 * kRows];
  __shared__ float squares_of[kWarps][kRows];
  const int lane = thread_index() & 31, warp = thread_index() >> 5, group = lane >> 2;
  const int column = block_index() * kColumns;
  const u16* first = weight + (u64)(column + group) * num_in;
  const u16* second = first + (u64)(kIsGated ? num_out : 8) * num_in;
  const u16* row = x + (u64)group * num_in;
  const int num_batches = num_in / (32 * kWarps * kBatch);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f}, squares = 0.0f;
  Parts even, odd;
  load(even, first, second, warp, lane, 0);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int batch = 0; batch < num_batches; batch += 2) {
    if (batch + 1 < num_batches) load(odd, first, second, warp, lane, batch + 1);
    consume(even, row, group < num_rows, warp, lane, batch, sums, squares);
    if (batch + 2 < num_batches) load(even, first, second, warp, lane, batch + 2);
    if (batch + 1 < num_batches) consume(odd, row, group < num_rows, warp, lane, batch + 1, sums, squares);
  }
  // A thread has weight rows g and g + 8 for rows 2 (lane % 4) and the next of x.
  const int of_x = 2 * (lane & 3);
  sums_of[warp][group * kRows + of_x] = sums[0];
  sums_of[warp][group * kRows + of_x + 1] = sums[1];
  sums_of[warp][(group + 8) * kRows + of_x] = sums[2];
  sums_of[warp][(group + 8) * kRows + of_x + 1] = sums[3];
  if (kIsGated) {
    squares += shuffle_xor(squares, 1);
    squares += shuffle_xor(squares, 2);
    if ((lane & 3) == 0) squares_of[warp][group] = squares;
  }
  sync_threads();
  const int index = thread_index(), at_row = index / kColumns, at_column = index % kColumns;
  if (at_row >= num_rows) return;
  float result = 0.0f, up = 0.0f, square = 0.0f;
#pragma unroll
  for (int part = 0; part < kWarps; ++part) {
    result += sums_of[part][at_column * kRows + at_row];
    if (kIsGated) {
      up += sums_of[part][(at_column + 8) * kRows + at_row];
      square += squares_of[part][at_row];
    }
  }
  const u64 to = (u64)at_row * num_out + column + at_column;
  if (kIsGated) {
    const float scale = eps < 0.0f ? 1.0f : reciprocal_root(square / num_in + eps);
    result = silu(result * scale) * (up * scale);
  } else if (residual) {
    result += low(residual[to]);
  }
  out[to] = (u16)pack(result, 0.0f);
}
