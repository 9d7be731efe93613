// Runs kernels/gemm_sm90/gemm.cu or, with ROW_TILED, kernels/gemm_sm90/gemm_row_tiled.cu on a CPU: every CUDA thread a fiber, in an order drawn
// from a seed.
//
// Only the primitives (inline PTX on a GPU) are this file's own, written from the PTX ISA. What is asynchronous on a GPU
// comes at any later time: boxes arrive out of order, and their places hold NaN meanwhile; a GEMM reads shared memory
// when it is waited for. Before the wait for the kernel ahead, activations are NaN; after a CTA has ended, so is its
// shared memory. Barriers count arrivals and bytes. What goes wrong is an error or NaN in the result; threads that all
// wait are a deadlock, which is reported.
//
// Built with -include of the kernel's constants and -DKERNEL_FILE.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
// turns: 0, or of gate and up of so many rows each, whose boxes hold 8 rows of both in turns.
struct TensorMap {
  const u16* data;
  int columns, rows, box_columns, box_rows, turns;
};

namespace emulator {

constexpr int kSharedBytes = 232448, kRankShift = 24, kStackBytes = 64 << 10;
constexpr u16 kPoison = 0xffff;  // NaN in both types.

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Rendezvous {
  int arrived = 0, generation = 0;
  float values[32];
};

struct Barrier {
  int count = 0, pending = 0, phase = 0;
  long bytes = 0;
};

struct Box {
  u32 to;
  const TensorMap* map;
  int column, row;
  u32 barrier;
};

// Numbers on their way to another CTA.
struct Message {
  u32 to;
  std::vector<float> values;
  u32 barrier;
};

struct Cta {
  std::vector<unsigned char> shared = std::vector<unsigned char>(kSharedBytes, 0xff);
  std::map<u32, Barrier> barriers;
  std::map<int, Rendezvous> meetings;  // Named barriers; 100 + warp.
  int num_threads_left = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::unique_ptr<char[]>(new char[kStackBytes]);
  int cta = 0, thread = 0;
  bool is_over = false, has_waited = false, has_signalled = false;
  std::function<bool()> may_run;
  // In groups, the last of which is not closed yet.
  std::vector<std::vector<std::function<void()>>> matmuls = {{}};
};

struct World {
  std::mt19937 random;
  std::vector<Cta> ctas;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Box> boxes;
  std::vector<Message> messages;
  // A warp that stands still for so many visits of fibers.
  int still_cta = 0, still_warp = 0, still_for = 0;
  int quiet_for = 0;  // Visits of fibers for which no message comes.
  int num_arrived = 0;
  Fiber* running = nullptr;
  ucontext_t scheduler;
  bool is_ahead_over = false;
  int first_block = 0;
  std::function<void()> end_ahead, body;
  std::string error;
};

World* world = nullptr;

Cta& cta() { return world->ctas[world->running->cta]; }
[[noreturn]] void fail(const std::string& what) {
  throw Error(what + " (thread " + std::to_string(world->running ? world->running->thread : -1) + ")");
}
bool chance(int of) { return world->random() % of == 0; }

void yield(std::function<bool()> may_run) {
  Fiber* self = world->running;
  self->may_run = std::move(may_run);
  swapcontext(&self->context, &world->scheduler);
  self->may_run = nullptr;
}

void shake() {
  if (chance(8)) yield(nullptr);
}

void stand_still(int cta);

void meet(Rendezvous& place, int count) {
  const int generation = place.generation;
  if (++place.arrived == count) {
    place.arrived = 0;
    ++place.generation;
    // One that goes on much later than the others is what a meeting less would show.
    if (count > 32 && chance(2)) stand_still(world->running->cta);
  }
  yield([&place, generation] { return place.generation != generation; });
}

unsigned char* shared(u32 at, u32 bytes, bool is_own) {
  const u32 rank = at >> kRankShift, offset = at & ((1 << kRankShift) - 1);
  if (rank >= world->ctas.size()) fail("an address in no CTA of the cluster");
  if (is_own && (int)rank != world->running->cta) fail("another CTA's shared memory as one's own");
  if (offset + bytes > kSharedBytes) fail("shared memory beyond the CTA's");
  if (offset % bytes % 16 && bytes < 1024) fail("an address out of line");
  return world->ctas[rank].shared.data() + offset;
}

Barrier& barrier(u32 at) {
  auto found = cta().barriers.find(at);
  if (found == cta().barriers.end()) fail("a barrier that was not initialised");
  return found->second;
}

void check_phase(Barrier& barrier) {
  if (barrier.pending < 0) fail("more arrivals than a barrier counts");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.count;
    ++barrier.phase;
  }
}

u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }

void land(const Box& box) {
  const TensorMap& map = *box.map;
  Cta& to = world->ctas[box.to >> kRankShift];
  const u32 offset = box.to & ((1 << kRankShift) - 1);
  for (int row = 0; row < map.box_rows; ++row)
    for (int column = 0; column < map.box_columns; ++column) {
      long from_row = box.row + row;
      const long from_column = box.column + column;
      bool is_inside = from_row < map.rows && from_column < map.columns;
      if (map.turns) {
        const long feature = (box.row + row / 16) * 8 + row % 8;
        is_inside = feature < map.turns && from_column < map.columns;
        from_row = row / 8 % 2 * map.turns + feature;
      }
      const u16 value = is_inside ? map.data[from_row * map.columns + from_column] : 0;
      memcpy(&to.shared[swizzled(offset + (row * map.box_columns + column) * 2)], &value, 2);
    }
  auto found = to.barriers.find(box.barrier);
  if (found == to.barriers.end()) fail("a box for a barrier that was not initialised");
  found->second.bytes -= (long)map.box_rows * map.box_columns * 2;
  // A neighbour's box may come before its bytes are expected here: transactions count below zero as well.
  if (found->second.bytes < (kMulticast > 1 ? -(1l << 20) : 0)) fail("more bytes than expected");
  check_phase(found->second);
}

void deliver(const Message& message) {
  Cta& to = world->ctas[message.to >> kRankShift];
  if (to.num_threads_left == 0) fail("numbers for a CTA that has ended");
  const u32 bytes = message.values.size() * 4;
  memcpy(shared(message.to, bytes, false), message.values.data(), bytes);
  auto found = to.barriers.find(message.barrier);
  if (found == to.barriers.end()) fail("numbers for a barrier that was not initialised");
  found->second.bytes -= bytes;
  if (found->second.bytes < 0) fail("more numbers than expected");
  check_phase(found->second);
}

// Some come long after they were sent.
void post(Message message) {
  if (world->messages.empty()) world->quiet_for = chance(4) ? world->random() % 10000 : 0;
  world->messages.push_back(std::move(message));
}

float to_float(u16 bits);

}  // namespace emulator

using emulator::world;

// Columns of a wgmma, and CTAs of a cluster.
#ifdef ROW_TILED
constexpr int kInstructionColumns = kTileN, kSplitK = 1;
constexpr bool kIsGated = false;
#else
constexpr int kInstructionColumns = kRows;
#endif

#define EMULATED
#define DEVICE static inline
#define KERNEL static void
#define MAP_ARGUMENT const TensorMap&

constexpr u64 kEvictFirst = 1, kEvictLast = 2;
DEVICE void sync_threads();
DEVICE void sync_consumers();
DEVICE void cluster_wait();
DEVICE void load_gated_box(u32 to, const TensorMap* map, int column, int group, u32 barrier, u64 policy);
DEVICE void load_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy);
DEVICE void load_multicast_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy, u16 ctas);
DEVICE void store_shared(u32 at, float value);
DEVICE void store_own(u32 at, float4 value);
DEVICE void store_two(u32 at, float first, float second);
DEVICE void wgmma(float (&sums)[kInstructionColumns / 2], u64 a, u64 b);

DEVICE u32 thread_index() { return world->running->thread; }
DEVICE u32 block_index() { return world->first_block + world->running->cta; }
// Not where the hardware puts it, so that the kernel has to align it.
DEVICE u32 shared_base() { return (u32)world->running->cta << emulator::kRankShift | 1040; }

DEVICE void sync_warp() { emulator::meet(emulator::cta().meetings[100 + thread_index() / 32], 32); }

DEVICE float shuffle_xor(float value, int mask) {
  emulator::Rendezvous& warp = emulator::cta().meetings[100 + thread_index() / 32];
  warp.values[thread_index() % 32] = value;
  emulator::meet(warp, 32);
  const float other = warp.values[thread_index() % 32 ^ mask];
  emulator::meet(warp, 32);
  return other;
}

DEVICE void barrier_init(u32 at, u32 count) {
  if (at % 8) emulator::fail("a barrier out of line");
  emulator::Barrier& barrier = emulator::cta().barriers[at];
  barrier.count = barrier.pending = count;
}
DEVICE void barrier_init_fence() {}
DEVICE void barrier_expect(u32 at, u32 bytes) {
  emulator::shake();
  emulator::Barrier& barrier = emulator::barrier(at);
  barrier.bytes += bytes;
  --barrier.pending;
  emulator::check_phase(barrier);
}
DEVICE void barrier_arrive(u32 at) {
  emulator::Barrier& barrier = emulator::barrier(at);
  --barrier.pending;
  emulator::check_phase(barrier);
}
DEVICE void barrier_arrive_at(u32 at) {
  emulator::shake();
  const u32 rank = at >> emulator::kRankShift;
  if (rank >= world->ctas.size()) emulator::fail("a barrier in no CTA of the cluster");
  emulator::Cta& to = world->ctas[rank];
  auto found = to.barriers.find(at);
  if (found == to.barriers.end()) emulator::fail("another CTA's barrier that was not initialised");
  if (to.num_threads_left == 0) emulator::fail("a barrier of a CTA that has ended");
  --found->second.pending;
  emulator::check_phase(found->second);
}
DEVICE void barrier_wait(u32 at, u32 parity) {
  emulator::Barrier& barrier = emulator::barrier(at);
  emulator::yield([&barrier, parity] { return (u32)(barrier.phase & 1) != parity; });
}

DEVICE void prefetch_map(const TensorMap*) {}

DEVICE void griddepcontrol_wait() {
  emulator::yield([] { return world->is_ahead_over; });
  world->running->has_waited = true;
}
DEVICE void griddepcontrol_launch_dependents() {
  if (!world->running->has_waited) emulator::fail("the next kernel may begin before those ahead are over");
  world->running->has_signalled = true;
}

DEVICE void wgmma_begin() {
  if (!world->running->has_waited) emulator::fail("a GEMM before the kernel ahead is over");
}
DEVICE void wgmma_end() {
  emulator::shake();
  world->running->matmuls.push_back({});
}
template <int kLeft>
DEVICE void wgmma_wait() {
  emulator::yield(nullptr);
  auto& groups = world->running->matmuls;
  while ((int)groups.size() > kLeft + 1) {
    for (auto& matmul : groups.front()) matmul();
    groups.erase(groups.begin());
  }
}
DEVICE void pin(float&) {}

DEVICE uint4 load_shared(u32 at) {
  uint4 value;
  memcpy(&value, emulator::shared(at, 16, true), 16);
  return value;
}
DEVICE float4 load_own(u32 at) {
  float4 value;
  memcpy(&value, emulator::shared(at, 16, true), 16);
  return value;
}
DEVICE u32 of_cta(u32 at, u32 rank) { return (at & ((1 << emulator::kRankShift) - 1)) | rank << emulator::kRankShift; }
DEVICE float load_one(u32 at) {
  float value;
  memcpy(&value, emulator::shared(at, 4, true), 4);
  return value;
}
DEVICE void send(u32 to, float4 value, u32 barrier) {
  emulator::shake();
  if (to % 16 || to >> emulator::kRankShift != barrier >> emulator::kRankShift) emulator::fail("numbers sent astray");
  emulator::post({to, {value.x, value.y, value.z, value.w}, barrier});
}
DEVICE void send_one(u32 to, float value, u32 barrier) {
  emulator::shake();
  if (to >> emulator::kRankShift != barrier >> emulator::kRankShift) emulator::fail("a number sent astray");
  emulator::post({to, {value}, barrier});
}
DEVICE void cluster_arrive() { ++world->num_arrived; }

DEVICE float half_to_float(u16 value) {
  _Float16 half;
  memcpy(&half, &value, 2);
  return (float)half;
}
DEVICE float bits_to_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
DEVICE u16 narrow(float value) {
  if (kIsHalf) {
    const _Float16 half = (_Float16)value;
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
  }
  u32 bits;
  memcpy(&bits, &value, 4);
  return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }
DEVICE float reciprocal_root(float value) { return 1.0f / std::sqrt(value); }
DEVICE float silu(float value) { return value / (1.0f + std::exp(-value)); }

#include KERNEL_FILE

float emulator::to_float(u16 bits) { return kIsHalf ? half_to_float(bits) : bits_to_float((u32)bits << 16); }

DEVICE void sync_threads() { emulator::meet(emulator::cta().meetings[0], kThreads); }
DEVICE void sync_consumers() { emulator::meet(emulator::cta().meetings[1], kConsumers); }
DEVICE void cluster_wait() {
  emulator::yield([] { return world->num_arrived == kThreads * kSplitK * kMulticast; });
}

DEVICE void load_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64) {
  emulator::shake();
  const u32 bytes = map->box_rows * map->box_columns * 2, base = (shared_base() + 1023) / 1024 * 1024;
  // A tile begins at a multiple of the swizzle's atom (base offset 0), in the ring.
  if (to % 1024 || to + bytes > base + kRingBytes) emulator::fail("a box in the wrong place");
  if (row < 0 || column < 0) emulator::fail("a box ahead of the matrix");
  memset(emulator::shared(to, bytes, true), 0xff, bytes);
  world->boxes.push_back({to, map, column, row, barrier});
}

DEVICE void load_gated_box(u32 to, const TensorMap* map, int column, int group, u32 barrier, u64 policy) {
  load_box(to, map, column, group, barrier, policy);
}

DEVICE void load_multicast_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64, u16 ctas) {
  emulator::shake();
  const u32 bytes = map->box_rows * map->box_columns * 2;
  if (to % 1024 || !(ctas >> world->running->cta & 1)) emulator::fail("a shared box in the wrong place");
  for (u32 rank = 0; rank < 16; ++rank) {
    if (!(ctas >> rank & 1)) continue;
    if (rank < world->ctas.size() && world->ctas[rank].num_threads_left == 0) emulator::fail("a box for a CTA that has ended");
    memset(emulator::shared(of_cta(to, rank), bytes, false), 0xff, bytes);
    world->boxes.push_back({of_cta(to, rank), map, column, row, of_cta(barrier, rank)});
  }
}

DEVICE void store_own(u32 at, float4 value) {
  if (at + 16 > (shared_base() + 1023) / 1024 * 1024 + kBarriersAt) emulator::fail("sums beyond their place");
  memcpy(emulator::shared(at, 16, true), &value, 16);
}

DEVICE void store_two(u32 at, float first, float second) {
  if (at + 8 > (shared_base() + 1023) / 1024 * 1024 + kBarriersAt) emulator::fail("sums beyond their place");
  memcpy(emulator::shared(at, 4, true), &first, 4);
  memcpy(emulator::shared(at + 4, 4, true), &second, 4);
}

DEVICE void store_shared(u32 at, float value) {
  if (at + 4 > (shared_base() + 1023) / 1024 * 1024 + kBarriersAt) emulator::fail("a store beyond the sums");
  memcpy(emulator::shared(at, 4, true), &value, 4);
}

// The thread's part of D += A B^T, from shared memory as the descriptors say.
DEVICE void wgmma(float (&sums)[kInstructionColumns / 2], u64 a, u64 b) {
  float* to = sums;
  const int thread = thread_index() % 128;
  const u32 rank = world->running->cta;
  auto number = [rank](u64 descriptor, int row, int k) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) emulator::fail("a descriptor of another mode");
    const u32 start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    const u32 at = emulator::swizzled(start + row / 8 * stride + row % 8 * 128 + k * 2);
    u16 bits;
    memcpy(&bits, emulator::shared(rank << emulator::kRankShift | at, 2, false), 2);
    return emulator::to_float(bits);
  };
  world->running->matmuls.back().push_back([=] {
    for (int h = 0; h < 2; ++h) {
      const int a_row = thread / 32 * 16 + thread % 32 / 4 + 8 * h;
      float numbers[16];
      for (int k = 0; k < 16; ++k) numbers[k] = number(a, a_row, k);
      for (int j = 0; j < kInstructionColumns / 8; ++j)
        for (int c = 0; c < 2; ++c)
          for (int k = 0; k < 16; ++k)
            to[4 * j + 2 * h + c] += numbers[k] * number(b, 8 * j + thread % 4 * 2 + c, k);
    }
  });
}

namespace emulator {

void enter() {
  try {
    world->body();
    if (!world->running->has_signalled) fail("a thread that never lets the next kernel begin");
  } catch (const Error& error) {
    world->error = error.what();
  }
  world->running->is_over = true;
  Cta& own = cta();
  if (--own.num_threads_left == 0) memset(own.shared.data(), 0xff, own.shared.size());
  swapcontext(&world->running->context, &world->scheduler);
}

void stand_still(int cta) {
  world->still_cta = cta;
  world->still_warp = world->random() % (kThreads / 32);
  world->still_for = world->random() % 10000;
}

// All threads of one cluster, to their end.
void run_cluster() {
  size_t num_left = world->fibers.size();
  int ahead_lasts = chance(2) ? 0 : world->random() % 4000;
  // One CTA may begin much later than the others.
  const int late = world->random() % world->ctas.size();
  int late_for = chance(2) ? 0 : world->random() % 60000;
  while (num_left && world->error.empty()) {
    bool has_run = false;
    const size_t first = world->random() % world->fibers.size();
    for (size_t i = 0; i < world->fibers.size() && world->error.empty(); ++i) {
      Fiber& fiber = *world->fibers[(first + i) % world->fibers.size()];
      if (!world->is_ahead_over && --ahead_lasts < 0) world->end_ahead();
      if (!world->boxes.empty() && chance(64)) {
        const size_t at = world->random() % world->boxes.size();
        const Box box = world->boxes[at];
        world->boxes.erase(world->boxes.begin() + at);
        land(box);
        has_run = true;
      }
      if (!world->messages.empty() && --world->quiet_for < 0 && chance(8)) {
        const size_t at = world->random() % world->messages.size();
        const Message message = world->messages[at];
        world->messages.erase(world->messages.begin() + at);
        deliver(message);
        has_run = true;
      }
      if (fiber.cta == late && --late_for > 0) {
        has_run = true;
        continue;
      }
      if (--world->still_for < 0 && chance(4096)) stand_still(world->random() % world->ctas.size());
      if (world->still_for > 0 && fiber.cta == world->still_cta && fiber.thread / 32 == world->still_warp) {
        has_run = true;
        continue;
      }
      if (fiber.is_over || (fiber.may_run && !fiber.may_run())) continue;
      // Not all that may: some lag behind.
      has_run = true;
      if (chance(4)) continue;
      world->running = &fiber;
      swapcontext(&world->scheduler, &fiber.context);
      if (fiber.is_over) --num_left;
    }
    if (!has_run && world->boxes.empty() && world->messages.empty() && world->is_ahead_over) world->error = "a deadlock";
  }
  if (world->error.empty() && !(world->boxes.empty() && world->messages.empty()))
    world->error = "boxes or numbers that nobody waited for";
}

}  // namespace emulator

// Of a launch, with what the kernel needs to align its ring.
extern "C" int shared_bytes() {
#ifdef ROW_TILED
  return kBarriersAt + 2 * kStages * 8 + 1024;
#else
  return kBarriersAt + (2 * kStages + 2) * 8 + 1024;
#endif
}

// 0, or 1 with a message. out holds the residual where has_residual.
extern "C" int emulate(u32 seed, const u16* weights, const u16* rows, u16* out, int has_residual, int num_rows,
                       int num_out, int num_in, float eps, const float* square_sums, int num_square_sums,
                       float* square_sums_out, char* message, int message_bytes) {
  using namespace emulator;
  World here;
  world = &here;
  here.random.seed(seed);
  const int num_cluster_ctas = kSplitK * kMulticast;
#ifdef ROW_TILED
  const int num_row_tiles = (num_rows + kTileRows * kMulticast - 1) / (kTileRows * kMulticast) * kMulticast;
  const int num_clusters = (num_out + kTileN - 1) / kTileN * num_row_tiles / kMulticast;
  const int weight_rows = kTileN / kMulticast, activation_rows = kTileRows;
#else
  const int num_clusters = (num_out + kColumns * kMulticast - 1) / (kColumns * kMulticast);
  const int weight_rows = kTileN, activation_rows = kRows / kMulticast;
#endif
  const size_t out_numbers = (size_t)num_rows * num_out, row_numbers = (size_t)num_rows * num_in;
  std::vector<u16> x(row_numbers), kept(out, out + out_numbers);
  std::vector<float> given((size_t)num_square_sums * num_rows);
  const TensorMap w_map = {weights, num_in, kIsGated ? 2 * num_out : num_out, kTileK, weight_rows, kIsGated ? num_out : 0};
  const TensorMap x_map = {x.data(), num_in, num_rows, kTileK, activation_rows, 0};
  here.end_ahead = [&] {
    for (size_t i = 0; i < out_numbers; ++i)
      if (out[i] != kPoison) here.error = "a result written before the kernel ahead is over";
    memcpy(out, kept.data(), out_numbers * 2);
    memcpy(x.data(), rows, row_numbers * 2);
    if (num_square_sums) memcpy(given.data(), square_sums, given.size() * 4);
    here.is_ahead_over = true;
  };
  here.body = [&] {
#ifdef ROW_TILED
    gemm_sm90_row_tiled(w_map, x_map, out, has_residual ? out : nullptr, num_rows, num_out, num_in, num_square_sums, eps,
        num_square_sums ? given.data() : nullptr, square_sums_out);
#else
    gemm_sm90(w_map, x_map, out, has_residual ? out : nullptr, num_rows, num_out, num_in, num_square_sums, eps,
        num_square_sums ? given.data() : nullptr, square_sums_out);
#endif
  };
  for (int cluster = 0; cluster < num_clusters && here.error.empty(); ++cluster) {
    kept.assign(out, out + out_numbers);
    std::fill(out, out + out_numbers, kPoison);
    std::fill(x.begin(), x.end(), kPoison);
    std::fill(given.begin(), given.end(), std::nanf(""));
    here.is_ahead_over = false;
    here.first_block = cluster * num_cluster_ctas;
    here.ctas.clear();
    here.ctas.resize(num_cluster_ctas);
    here.fibers.clear();
    here.num_arrived = 0;
    for (int rank = 0; rank < num_cluster_ctas; ++rank) {
      here.ctas[rank].num_threads_left = kThreads;
      for (int thread = 0; thread < kThreads; ++thread) {
        here.fibers.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *here.fibers.back();
        fiber.cta = rank;
        fiber.thread = thread;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = kStackBytes;
        makecontext(&fiber.context, enter, 0);
      }
    }
    try {
      run_cluster();
    } catch (const Error& error) {
      here.error = error.what();
    }
  }
  snprintf(message, message_bytes, "%s", here.error.c_str());
  const bool is_right = here.error.empty();
  world = nullptr;
  return !is_right;
}
