// Runs kernels/gemm_sm90/few_rows.cu on a CPU: every CUDA thread of a CTA a thread, CTA after CTA.
//
// Only the primitives (inline PTX on a GPU) are this file's own, written from the PTX ISA: mma.m16n8k16 from the fragments
// of its 32 lanes. Before the wait for the kernel ahead, rows of x are NaN.
//
// Built with -include of the kernel's constants and -DKERNEL_FILE.

#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct uint4 {
  u32 x, y, z, w;
};
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct TensorMap {};

#define EMULATED
#define DEVICE static inline
#define KERNEL static void
#define MAP_ARGUMENT const TensorMap
#define __shared__ static

class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int generation = generation_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++generation_;
      met_.notify_all();
    } else {
      met_.wait(lock, [&] { return generation != generation_; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable met_;
  int size_, arrived_ = 0, generation_ = 0;
};

struct Warp {
  Meeting meeting{32};
  u32 a[32][4], b[32][2];
  float values[32];
};

static thread_local int thread_number;
// Shared memory of a CTA; copies of a thread to it, by groups: they are made when the thread waits for them, no earlier.
static unsigned char memory[256 << 10];
struct Copy {
  u32 to;
  const u16* from;
};
static thread_local std::vector<Copy> uncommitted;
static thread_local std::deque<std::vector<Copy>> groups;
static int block_number;
static Meeting* cta;
static Warp* warps;
static bool is_ahead_over;
static const u16 *rows_given, *rows_begin;
static u64 num_row_numbers;

static float number(u16 bits) {
  if (kIsHalf) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
  }
  const u32 wide = (u32)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static u16 bits_of(float value) {
  if (kIsHalf) {
    const _Float16 half = (_Float16)value;
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
  }
  u32 wide;
  memcpy(&wide, &value, 4);
  return (u16)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

static u32 thread_index() { return thread_number; }
static u32 block_index() { return block_number; }
static void sync_threads() { cta->wait(); }
static void griddepcontrol_wait() {
  cta->wait();
  is_ahead_over = true;
  cta->wait();
}
static void griddepcontrol_launch_dependents() {}
static float reciprocal_root(float value) { return 1.0f / std::sqrt(value); }
static float silu(float value) { return value / (1.0f + std::exp(-value)); }
static u32 pack(float low, float high) { return (u32)bits_of(high) << 16 | bits_of(low); }
static float low(u32 packed) { return number((u16)packed); }
static float high(u32 packed) { return number((u16)(packed >> 16)); }
static float sum_of_squares(u32 packed) { return low(packed) * low(packed) + high(packed) * high(packed); }

static float shuffle_xor(float value, int mask) {
  Warp& warp = warps[thread_number / 32];
  const int lane = thread_number % 32;
  warp.values[lane] = value;
  warp.meeting.wait();
  const float found = warp.values[lane ^ mask];
  warp.meeting.wait();
  return found;
}

static u32 shared_base() { return 0; }

static uint4 load_shared(u32 at) {
  uint4 part;
  memcpy(&part, memory + at, 16);
  return part;
}

static void copy_weight(u32 to, const u16* from) { uncommitted.push_back({to, from}); }

static void copy_row(u32 to, const u16* from, bool is_row) {
  static const u16 zeros[8] = {}, nans[8] = {0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff};
  const bool is_right = is_ahead_over && from >= rows_begin && from + 8 <= rows_begin + num_row_numbers;
  uncommitted.push_back({to, !is_row ? zeros : is_right ? from : nans});
}

static void commit_copies() {
  groups.push_back(std::move(uncommitted));
  uncommitted.clear();
}

template <int kLeft>
static void wait_for_copies() {
  for (; groups.size() > kLeft; groups.pop_front())
    for (const Copy& copy : groups.front()) memcpy(memory + copy.to, copy.from, 16);
}

static void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Warp& warp = warps[thread_number / 32];
  const int lane = thread_number % 32, group = lane >> 2, of_group = lane & 3;
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(warp.a[lane], a, 16);
  memcpy(warp.b[lane], b, 8);
  warp.meeting.wait();
  for (int index = 0; index < 4; ++index) {
    const int row = group + (index >= 2 ? 8 : 0), column = 2 * of_group + index % 2;
    for (int k = 0; k < 16; ++k) {
      // Rows of A: lanes 4 * (row % 8) + k % 8 / 2, registers by the halves of row and k; columns of B alike.
      const u32 left = warp.a[4 * (row % 8) + k % 8 / 2][row / 8 + 2 * (k / 8)];
      const u32 right = warp.b[4 * column + k % 8 / 2][k / 8];
      sums[index] += (k % 2 ? high(left) : low(left)) * (k % 2 ? high(right) : low(right));
    }
  }
  warp.meeting.wait();
}

#include KERNEL_FILE

extern "C" void emulate(const u16* weights, const u16* rows, u16* out, int has_residual, int num_rows, int num_out,
                        int num_in, float eps) {
  rows_begin = rows;
  num_row_numbers = (u64)num_rows * num_in;
  for (block_number = 0; block_number < num_out / kColumns; ++block_number) {
    Meeting meeting(kThreads);
    std::vector<Warp> of_cta(kWarps);
    cta = &meeting;
    warps = of_cta.data();
    is_ahead_over = false;
    memset(memory, 0xff, sizeof memory);
    std::vector<std::thread> threads;
    for (int index = 0; index < kThreads; ++index) {
      threads.emplace_back([=] {
        thread_number = index;
        few_rows({}, {}, weights, rows, out, has_residual ? out : nullptr, num_rows, num_out, num_in, eps);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}
