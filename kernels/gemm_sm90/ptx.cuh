// Hardware primitives of the sm90 GEMMs (gemm.cu, gemm_row_tiled.cu) in inline PTX.
//
// Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (shared memory matrix layout, matrix descriptor,
// register fragments of D), "cp.async.bulk.tensor", "Tensors: swizzling modes", "mbarrier", "st.async",
// "barrier.cluster", "griddepcontrol".
//
// Constants set at compile time, beside those of each kernel: kIsHalf (or bfloat16), kMinCtas (CTAs of a multiprocessor that find
// registers), kMaxPolls (0, or after how many a wait that does not end is an error: to find mistakes); and, for an emulation
// on a CPU, EMULATED with the primitives. The kernel sets kThreads and kConsumers (those that multiply) ahead of them.

#ifndef EMULATED

struct alignas(64) TensorMap {
  u64 opaque[16];
};

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(kThreads, kMinCtas)
#define MAP_ARGUMENT const __grid_constant__ TensorMap

DEVICE u32 shared_base() {
  extern __shared__ __align__(1024) char dynamic[];
  return (u32)__cvta_generic_to_shared(dynamic);
}

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE void sync_threads() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffff, value, mask); }

// Of the warpgroups that multiply alone.
DEVICE void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine (async proxy) too.
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE bool is_over(u32 barrier, u32 parity) {
  u32 is_over;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(is_over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_over;
}

// Until the phase of this parity is complete; the first phase of a barrier has parity 0.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  int polls = 0;
  while (!is_over(barrier, parity))
    if (kMaxPolls && ++polls > kMaxPolls) asm volatile("trap;");
}

// A box at (column, row) of a matrix, columns first; what lies outside of it is zeros, and counts as bytes too.
// kPolicy: the L2's, as createpolicy.fractional encodes evict_first and evict_last of all lines.
constexpr u64 kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull;

DEVICE void load_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// Of gate and up [2, num_out, K], seen as (K, 8 rows, 2, num_out / 8): 8 rows of gate, then 8 of up, interleaved.
DEVICE void load_gated_box(u32 to, const TensorMap* map, int column, int group, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(column), "r"(0), "r"(group), "r"(barrier), "l"(policy)
      : "memory");
}

// As load_box, to the same address in all CTAs of the mask, each of whose barriers at the same address gets the bytes.
DEVICE void load_multicast_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy, u16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(ctas), "l"(policy)
      : "memory");
}

// At the barrier of another CTA, by its address in the cluster. What it orders are a warpgroup's own wgmmas that are
// over, not writes: with .release.cluster it would wait for all of them (MEMBAR.GPU).
DEVICE void barrier_arrive_at(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until no more than so many groups are under way.
template <int kLeft>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Keeps the compiler from moving uses of a sum across the waits, of which it does not know that they write it.
DEVICE void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }

DEVICE void store_shared(u32 at, float value) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory"); }

DEVICE uint4 load_shared(u32 at) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(at)
               : "memory");
  return value;
}

DEVICE float load_one(u32 at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
}

DEVICE void store_two(u32 at, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(first), "f"(second) : "memory");
}

DEVICE void store_own(u32 at, float4 value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

DEVICE float4 load_own(u32 at) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(at)
               : "memory");
  return value;
}

// The address in the cluster of a byte in the shared memory of one of its CTAs.
DEVICE u32 of_cta(u32 at, u32 rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(at), "r"(rank));
  return mapped;
}

// To the shared memory of another CTA, by the address in the cluster, whose barrier there counts the bytes.
DEVICE void send(u32 to, float4 value, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
}

DEVICE void send_one(u32 to, float value, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(value),
               "r"(barrier)
               : "memory");
}

// Of all threads of all CTAs: behind the wait all have arrived. Orders no writes but initialised barriers, which have a
// fence of their own.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

DEVICE u32 pack(float low, float high) {
  u32 packed;
  if (kIsHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

DEVICE float half_to_float(u16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}

DEVICE float bits_to_float(u32 bits) { return __uint_as_float(bits); }
DEVICE float reciprocal_root(float value) { return rsqrtf(value); }
DEVICE float silu(float value) { return __fdividef(value, 1.0f + __expf(-value)); }

#endif  // EMULATED

// Of two numbers in the inputs' type.
DEVICE float low(u32 packed) { return kIsHalf ? half_to_float((u16)packed) : bits_to_float(packed << 16); }
DEVICE float high(u32 packed) { return kIsHalf ? half_to_float((u16)(packed >> 16)) : bits_to_float(packed & 0xffff0000u); }

DEVICE float sum_of_squares(u32 packed) { return low(packed) * low(packed) + high(packed) * high(packed); }

// Matrix descriptor of a K-major operand in 128-byte swizzle: bits 0-13 start address / 16; 16-29 leading byte offset,
// which this layout does not use (1); 32-45 stride byte offset / 16: from 8 rows of 128 bytes to the next, 1024; 49-51
// base offset, 0 since each tile begins at a multiple of 1024; 62-63 the mode, 1.
// Along K the start moves by 32 bytes (16 numbers) within the atom: hardware swizzles the address it comes to.
constexpr u64 kDescriptor = (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16;

DEVICE u64 descriptor(u32 at) { return kDescriptor | (u64)((at & 0x3ffff) >> 4); }
