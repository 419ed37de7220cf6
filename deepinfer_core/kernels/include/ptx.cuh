// The few PTX instructions that the tensor-core kernels need, without a single header: NVRTC finds nothing to miss.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DI_DEVICE __device__ __forceinline__

#ifndef BF16  // 0: FP16 activations and output, 1: BF16
#define BF16 0
#endif

DI_DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// (a & mask) | bits in one instruction.
DI_DEVICE u32 mask_or(u32 a, u32 mask, u32 bits) {
  u32 r;
  asm("lop3.b32 %0,%1,%2,%3,0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}

DI_DEVICE u32 rotate_right(u32 a, u32 bits) { return __funnelshift_r(a, a, bits); }

DI_DEVICE float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(h));
  return f;
}

DI_DEVICE u16 float_to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(f));
  return h;
}

// Activations: FP16 or BF16 by BF16.
DI_DEVICE float act_to_float(u16 h) {
#if BF16
  return __uint_as_float((u32)h << 16);
#else
  return half_to_float(h);
#endif
}

DI_DEVICE u16 float_to_act(float f) {
#if BF16
  u16 h;
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(h) : "f"(f));
  return h;
#else
  return float_to_half(f);
#endif
}

// Not volatile: the compiler may move it between loads, which is worth a latency per mma.
// c += a (16 features x 16 k) times b (16 k x 8 rows), FP32 accumulators.
// Lane (g, t) = (lane / 4, lane % 4) holds c[0..3] = (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1).
DI_DEVICE void mma16816(float* c, const u32* a, u32 b0, u32 b1) {
#if BF16
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// 16 bytes from global to shared memory past L1; a cache policy keeps streamed weights from pushing x out of L2.
DI_DEVICE void copy16_async(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(dst), "l"(src) : "memory");
}
DI_DEVICE void copy16_async_hint(u32 dst, const void* src, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0],[%1],16,%2;" ::"r"(dst), "l"(src), "l"(policy)
               : "memory");
}
// Copies the first BYTES of 16 and zeroes the rest.
DI_DEVICE void copy16_async_part(u32 dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
DI_DEVICE u64 evict_first_policy() {
  u64 p;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(p));
  return p;
}
DI_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DI_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Coherent loads: the bytes may have been written by the kernel before us while this one was already running.
DI_DEVICE uint4 global_load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DI_DEVICE float4 global_load_l2(const float* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}

// Programmatic dependent launch (9.0 and newer, and only when the launch asks for it; otherwise both do nothing):
// weights are constant, so a kernel may fetch them before the kernel ahead of it has ended.
DI_DEVICE void dependents_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DI_DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Blocks of a cluster (9.0 and newer): what one wrote to its shared memory before the barrier, the others read after it.
DI_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DI_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DI_DEVICE float4 cluster_load16(u32 address, u32 rank) {
  u32 remote;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3},[%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(remote)
               : "memory");
  return v;
}
