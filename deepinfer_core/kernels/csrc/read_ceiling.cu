// Reads n 16-byte words and keeps nothing: what the memory of this card can deliver at most.
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* data, long long n, unsigned* sink) {
  unsigned seen = 0;
  const long long step = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; u++) v[u] = __ldcs(data + i + u * step);
#pragma unroll
    for (int u = 0; u < 4; u++) seen ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < n; i += step) seen ^= data[i].x;
  if (seen == 0x9e3779b9u) *sink = seen;  // keeps the loads alive; random data makes it a one in 2^32 write
}
