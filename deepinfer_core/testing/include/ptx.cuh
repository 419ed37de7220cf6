// Stands in for kernels/include/ptx.cuh so that a kernel's own source runs on a CPU, compiled by g++: a thread is a
// fiber, barriers yield, warp instructions exchange their operands at warp barriers. It shows whether indices, layouts
// and the order of barriers are right; it shows nothing of speed, of memory order, or of asynchronous copies that are
// read too early (a copy is done at once).
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
using std::max;
using std::min;

#ifndef BF16
#define BF16 0
#endif
#define DI_DEVICE static inline
#define __device__
#define __global__
#define __launch_bounds__(...)

struct Index {
  int x, y, z;
};
struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- fibers: all threads of a cluster's blocks, run in turn ---
static Index gridDim, blockDim, threadIdx, blockIdx;
static const u32 ARENA = 1 << 18;  // bytes of shared memory addresses a block
struct Barrier {
  int arrived = 0;
  long generation = 0;
};
struct Block {
  Barrier all, warps[32];
  u32 exchange[32][32][8];
  std::vector<u8> shared;
  u32 arrived;  // the one static __shared__ variable there is
};
struct Fiber {
  ucontext_t context;
  std::vector<u8> stack;
  bool done;
  int block;
  Index thread, block_index;
};
static std::vector<Fiber> fibers;
static std::vector<Block> blocks;
static Barrier cluster_barrier;
static ucontext_t home;
static int current;

static Block& mine() { return blocks[fibers[current].block]; }
static void give_way() { swapcontext(&fibers[current].context, &home); }
static void meet_at(Barrier& b, int threads) {
  const long generation = b.generation;
  if (++b.arrived == threads) {
    b.arrived = 0;
    b.generation++;
  } else {
    while (b.generation == generation) give_way();
  }
}
static void __syncwarp() { meet_at(mine().warps[threadIdx.x >> 5], 32); }
static void __syncthreads() { meet_at(mine().all, blockDim.x); }
static void __threadfence() {}
static void cluster_arrive() {}
static void cluster_wait() { meet_at(cluster_barrier, (int)fibers.size()); }

template <class F>
static void emulate(Index grid, int threads, int cluster, int shared_bytes, F body) {
  static F* kernel;
  kernel = &body;
  gridDim = grid;
  blockDim = {threads, 1, 1};
  fibers.clear();
  fibers.resize(threads * cluster);
  blocks.resize(cluster);
  for (int z = 0; z < grid.z; z++)
    for (int x = 0; x < grid.x; x++)
      for (int y0 = 0; y0 < grid.y; y0 += cluster) {
        cluster_barrier = Barrier();
        for (int c = 0; c < cluster; c++) {
          blocks[c] = Block();
          blocks[c].shared.assign(shared_bytes + 256, 0xff);  // NaN, and room to align
        }
        for (int i = 0; i < threads * cluster; i++) {
          Fiber& f = fibers[i];
          f.done = false;
          f.block = i / threads;
          f.thread = {i % threads, 0, 0};
          f.block_index = {x, y0 + f.block, z};
          f.stack.resize(1 << 16);
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = f.stack.data();
          f.context.uc_stack.ss_size = f.stack.size();
          f.context.uc_link = &home;
          makecontext(&f.context, (void (*)())(+[]() {
                        (*kernel)();
                        fibers[current].done = true;
                      }),
                      0);
        }
        for (int left = threads * cluster, idle = 0; left;) {
          const int before = left;
          for (int i = 0; i < (int)fibers.size(); i++) {
            if (fibers[i].done) continue;
            current = i;
            threadIdx = fibers[i].thread;
            blockIdx = fibers[i].block_index;
            swapcontext(&home, &fibers[i].context);
            left -= fibers[i].done;
          }
          idle = left == before ? idle + 1 : 0;
          if (idle > 2000000) abort();  // threads that wait for each other
        }
      }
}

// --- memory ---
static u8* shared_memory() { return (u8*)(((u64)mine().shared.data() + 127) & ~(u64)127); }
static u32& arrived_of_block() { return mine().arrived; }
static u32 smem_address(const void* p) { return fibers[current].block * ARENA + (u32)((const u8*)p - shared_memory()); }
static u8* smem_pointer(u32 address) {
  Block& b = blocks[address / ARENA];
  const u32 offset = address % ARENA;
  if (offset + 16 > b.shared.size() - 128) abort();  // beyond what the launch asked for
  return (u8*)(((u64)b.shared.data() + 127) & ~(u64)127) + offset;
}
static void copy16_async(u32 dst, const void* src) { memcpy(smem_pointer(dst), src, 16); }
static void copy16_async_hint(u32 dst, const void* src, u64) { copy16_async(dst, src); }
static void copy16_async_part(u32 dst, const void* src, int bytes) {
  memset(smem_pointer(dst), 0, 16);
  memcpy(smem_pointer(dst), src, bytes);
}
static u64 evict_first_policy() { return 0; }
static void copy_commit() {}
template <int N>
static void copy_wait() {}
static float4 global_load_l2(const float* p) { return *(const float4*)p; }
static float4 cluster_load16(u32 address, u32 rank) { return *(float4*)smem_pointer(rank * ARENA + address % ARENA); }
static u32 atomicAdd(u32* p, u32 v) {
  const u32 old = *p;
  *p += v;
  return old;
}
static void dependents_may_start() {}
static void wait_for_predecessor() {}

// --- numbers ---
static u32 mask_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }
static u32 rotate_right(u32 a, u32 bits) { return a >> bits | a << (32 - bits); }
static float __uint_as_float(u32 v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
static float half_to_float(u16 h) {
  _Float16 v;
  memcpy(&v, &h, 2);
  return v;
}
static u16 float_to_half(float f) {
  const _Float16 v = f;
  u16 h;
  memcpy(&h, &v, 2);
  return h;
}
static float act_to_float(u16 h) { return BF16 ? __uint_as_float((u32)h << 16) : half_to_float(h); }
static u16 float_to_act(float f) {
  if (!BF16) return float_to_half(f);
  u32 v;
  memcpy(&v, &f, 4);
  return (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
static u32 act_minus(u32 a, u32 b) {
  return float_to_act(act_to_float(a) - act_to_float(b)) |
         (u32)float_to_act(act_to_float(a >> 16) - act_to_float(b >> 16)) << 16;
}
static void mma16816(float* c, const u32* a, u32 b0, u32 b1) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  u32(*lanes)[8] = mine().exchange[threadIdx.x >> 5];
  memcpy(lanes[lane], a, 16);
  lanes[lane][4] = b0;
  lanes[lane][5] = b1;
  __syncwarp();
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      const int pair = (k & 7) >> 1, high = k >> 3, shift = 16 * (k & 1);
      const float av = act_to_float(lanes[g * 4 + pair][high * 2 + (i >> 1)] >> shift);
      const float bv = act_to_float(lanes[(t * 2 + (i & 1)) * 4 + pair][4 + high] >> shift);
      c[i] += av * bv;
    }
  __syncwarp();
}
