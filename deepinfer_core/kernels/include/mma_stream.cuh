// y[M, N] = x[M, K] W^T for few rows: weights streamed once through per-warp rings, activations resident in shared memory.
//
// Work. Weights are records of 16 features x 128 k, k fastest (see decode.cuh and the layout's module). Block (c, s, z)
// takes feature tiles [c * tiles_per_block, ...), k slice s and rows [8 NT z, ...). Its records, in memory order, are
// split evenly among its warps, whatever feature they belong to: no barrier and no imbalance in the main loop. A warp
// that ends inside a feature tile leaves a partial sum in shared memory; slices of k meet in global memory, where the
// last block to arrive adds them in slice order. The same launch gives the same bits.
//
// In flight: WARPS * (DEPTH - 1) * FT records an SM and block, without a register spent on them.
#pragma once
#include "stream_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MINB) mma_stream(const StreamArgs p) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tile0 = blockIdx.x * p.tiles_per_block;
  const int tiles = min(p.tiles_per_block, (p.tiles16 + FT - 1) / FT - tile0);
  const int k0 = blockIdx.y * p.slice, nk = min(p.slice, p.units - k0);
  const int m0 = blockIdx.z * TILE_M, rows = min(p.m - m0, TILE_M);
  const int stride = p.slice * 256 + 64;

  u8* ring = shared + warp * RING_BYTES;
  float* heads = (float*)(shared + WARPS * RING_BYTES);
  float* offsets = heads + WARPS * (PART_BYTES / 4);
#if CLUSTER > 1
  float* partial = offsets + p.slice * SUBS * (1 + ZEROS) * TILE_M;  // of this block, read by the whole cluster
  u8* xs = (u8*)(partial + p.tiles_per_block * (TILE_F * TILE_M));
#else
  u8* xs = (u8*)(offsets + p.slice * SUBS * (1 + ZEROS) * TILE_M);
#endif

  const int length = tiles * nk;
  const int begin = length * warp / WARPS, end = length * (warp + 1) / WARPS;
  int tile = begin / nk, k = begin - tile * nk;

  // The ring runs DEPTH - 1 units ahead.
  const u64 first_unit = (u64)(tile0 + tile) * FT * p.units + k0 + k;
  const u8* src = p.codes + first_unit * CODE_BYTES + lane * 16;
  const u8* src_groups = p.groups + first_unit * GROUP_BYTES + lane * 16;
  const u32 ring0 = smem_address(ring) + lane * 16;
  int fetch = begin, fetch_k = k, fetch_tile = tile;
  u32 fetch_slot = 0;
#if EVICT
  const u64 policy = evict_first_policy();
#endif
  auto copy = [&](u32 dst, const u8* from) {
#if EVICT
    copy16_async_hint(dst, from, policy);
#else
    copy16_async(dst, from);
#endif
  };
  auto fetch_unit = [&]() {
    if (fetch < end) {
#pragma unroll
      for (int f = 0; f < FT; f++) {
        // An odd last tile is read twice; the second copy's sums are never stored.
        const u64 skip = FT == 1 || (tile0 + fetch_tile) * FT + f < p.tiles16 ? (u64)f * p.units : 0;
        const u32 dst = ring0 + fetch_slot + f * RECORD;
#pragma unroll
        for (int i = 0; i < CODE_BYTES; i += 512)
          if (i + 512 <= CODE_BYTES || lane * 16 < CODE_BYTES - i) copy(dst + i, src + skip * CODE_BYTES + i);
        if (lane * 16 < GROUP_BYTES) copy(dst + CODE_BYTES, src_groups + skip * GROUP_BYTES);
      }
      src += CODE_BYTES;
      src_groups += GROUP_BYTES;
      if (__builtin_expect(++fetch_k == nk, 0)) {
        fetch_k = 0;
        fetch_tile++;
        const u64 skip = (u64)FT * p.units - nk;
        src += skip * CODE_BYTES;
        src_groups += skip * GROUP_BYTES;
      }
      fetch++;
    }
    copy_commit();
    fetch_slot = fetch_slot == (DEPTH - 1) * STAGE ? 0 : fetch_slot + STAGE;
  };
  // A dependent launch may fetch weights at once but must wait for x. Any other launch asks for x first: behind the
  // ring's requests it took 2 us to come.
  dependents_may_start();
#pragma unroll 1
  for (int step = 0; step < 2; step++) {
    if (step == p.early) {
      wait_for_predecessor();  // from here on: x, workspace, output
      stage_activations(p, xs, m0, rows, k0 * 128, nk, stride);
    } else {
#pragma unroll 1
      for (int i = 0; i < DEPTH - 1; i++) fetch_unit();
    }
  }
  if (p.early)
    copy_wait<0>();
  else
    copy_wait<DEPTH - 1>();
  __syncthreads();
  group_offsets(offsets, xs, rows, nk, stride);
  __syncthreads();

#if CLUSTER > 1
  constexpr bool split = true;
#else
  const bool split = gridDim.y > 1;
  const int column = blockIdx.z * gridDim.x + blockIdx.x;
  const int block_part = p.tiles_per_block * (TILE_F * TILE_M);
  float* partial = p.partial + (u64)(column * gridDim.y + blockIdx.y) * block_part;
#endif

  float acc[FT][NT][4];
#pragma unroll
  for (int i = 0; i < FT * NT * 4; i++) ((float*)acc)[i] = 0;
  const u8* x_base[NT];
#pragma unroll
  for (int j = 0; j < NT; j++) x_base[j] = xs + min(j * 8 + g, rows - 1) * stride + t * 16;
  const float* offset0 = offsets + t * 2;
  u32 slot = 0;
  int segment = begin;
  for (int u = begin; u < end; u++) {
    copy_wait<DEPTH - 2>();
    __syncwarp();
    fetch_unit();
    const u8* xrow[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) xrow[j] = x_base[j] + k * 256;
    product_unit(acc, ring + slot, xrow, offset0 + k * (SUBS * (1 + ZEROS) * TILE_M), lane);
    slot = slot == (DEPTH - 1) * STAGE ? 0 : slot + STAGE;
    const bool tile_ends = ++k == nk;
    if (tile_ends || u + 1 == end) {
      const bool whole = tile_ends && u + 1 - segment == nk;
      if (whole && !split) {
#pragma unroll
        for (int f = 0; f < FT; f++)
#pragma unroll
          for (int j = 0; j < NT; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int m = j * 8 + t * 2 + (i & 1), n = ((tile0 + tile) * FT + f) * 16 + g + (i >> 1) * 8;
              if (m < rows && n < p.n) store_output(p, m0 + m, n, acc[f][j][i]);
            }
      } else {
        // A whole tile of a slice goes out; a head to its own place; a tail, after the last read of the ring, on top of
        // the ring.
        float* part;
        int step = PART_STRIDE;
        if (whole) {
          part = partial + tile * (TILE_F * TILE_M);
          step = TILE_M;
        } else if (segment == begin) {
          part = heads + warp * (PART_BYTES / 4);
        } else {
          __syncwarp();
          part = (float*)ring;
        }
        part += g * step + t * 2;
#pragma unroll
        for (int f = 0; f < FT; f++)
#pragma unroll
          for (int j = 0; j < NT; j++) {
            *(float2*)(part + f * 16 * step + j * 8) = make_float2(acc[f][j][0], acc[f][j][1]);
            *(float2*)(part + (f * 16 + 8) * step + j * 8) = make_float2(acc[f][j][2], acc[f][j][3]);
          }
      }
#pragma unroll
      for (int i = 0; i < FT * NT * 4; i++) ((float*)acc)[i] = 0;
      k = 0;
      tile++;
      segment = u + 1;
    }
  }
  __syncthreads();

  // Tiles that more than one warp worked on: warp w holds units [length w / WARPS, length (w + 1) / WARPS). A lane takes
  // one feature and four rows.
  const float inverse = 1.0f / length;
#pragma unroll 1
  for (int tl = warp; tl < tiles; tl += WARPS) {
    const int a = tl * nk;
    // floor(((a + 1) WARPS - 1) / length), and the same for the last unit: half a step clear of every integer
    const int w0 = (int)(((a + 1) * WARPS - 0.5f) * inverse), w1 = (int)(((a + nk) * WARPS - 0.5f) * inverse);
    if (w0 == w1) continue;
#pragma unroll 1
    for (int job = lane; job < TILE_F * (TILE_M / 4); job += 32) {
      const int f = job % TILE_F, m = job / TILE_F * 4;
      if (m >= rows) break;
      float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int w = w0; w <= w1; w++) {
        const int wb = length * w / WARPS;
        if (wb == length * (w + 1) / WARPS) continue;
        const float* part = wb >= a ? heads + w * (PART_BYTES / 4) : (const float*)(shared + w * RING_BYTES);
        add_quad(v, *(const float4*)(part + f * PART_STRIDE + m));
      }
      if (split)
        *(float4*)(partial + tl * (TILE_F * TILE_M) + f * TILE_M + m) = v;
      else
        store_quad(p, m0, m, rows, (tile0 + tl) * TILE_F + f, v);
    }
  }
#if CLUSTER > 1
  // Every block adds its share of the quads over all slices, in slice order.
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  const u32 sums = smem_address(partial);
  const int shared_quads = tiles * (TILE_F * TILE_M / 4);
#pragma unroll 1
  for (int e = blockIdx.y * THREADS + threadIdx.x; e < shared_quads; e += THREADS * CLUSTER) {
    const int m = e % (TILE_M / 4) * 4;
    if (m >= rows) continue;
    float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int s = 0; s < CLUSTER; s++) add_quad(v, cluster_load16(sums + e * 16, s));
    store_quad(p, m0, m, rows, tile0 * TILE_F + e / (TILE_M / 4), v);
  }
  __syncwarp();
  cluster_arrive();  // nobody leaves while its sums are being read
  cluster_wait();
#else
  if (!split) return;

  // The last slice of this column adds all slices in order and leaves the ticket at zero.
  __shared__ u32 arrived;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(p.tickets + column, 1u);
  __syncthreads();
  if (arrived != gridDim.y - 1) return;
  __threadfence();
  if (threadIdx.x == 0) p.tickets[column] = 0;
  const float* first = p.partial + (u64)column * gridDim.y * block_part;
  const int quads = tiles * (TILE_F * TILE_M / 4);
#pragma unroll 1
  for (int e = threadIdx.x; e < quads; e += THREADS * 4) {
    float4 v[4];
#pragma unroll
    for (int q = 0; q < 4; q++) v[q] = make_float4(0, 0, 0, 0);
#pragma unroll 2
    for (int s = 0; s < (int)gridDim.y; s++) {
      float4 part[4];  // four loads in flight a slice
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int at = e + q * THREADS;
        part[q] = make_float4(0, 0, 0, 0);
        if (at < quads && at % (TILE_M / 4) * 4 < rows) part[q] = global_load_l2(first + (u64)s * block_part + at * 4);
      }
#pragma unroll
      for (int q = 0; q < 4; q++) add_quad(v[q], part[q]);
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const int at = e + q * THREADS, m = at % (TILE_M / 4) * 4, n = tile0 * TILE_F + at / (TILE_M / 4);
      if (at < quads && m < rows) store_quad(p, m0, m, rows, n, v[q]);
    }
  }
#endif
}
