// Asks CUTLASS whether its stream-K scheduler keeps sums over K whole. Reads lines "N K M tile_n tile_m cluster_n" and
// prints 1 if every output tile is summed by one unit, else 0. As vLLM's Machete calls it: CUTLASS's M is N here, TileK
// is 64, all arguments of the scheduler are defaults, and the device has 132 SMs.
#include <cstdio>

#include "cutlass/gemm/kernel/tile_scheduler_params.h"

using Params = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamKParams;

int main() {
  int n, k, m, tile_n, tile_m, cluster_n;
  while (std::scanf("%d %d %d %d %d %d", &n, &k, &m, &tile_n, &tile_m, &cluster_n) == 6) {
    cutlass::KernelHardwareInfo hardware;
    hardware.sm_count = 132;
    Params params;
    params.initialize(cutlass::gemm::BatchedGemmCoord(n, m, k, 1), cutlass::gemm::GemmCoord(tile_n, tile_m, 64),
                      cutlass::gemm::GemmCoord(cluster_n, 1, 1), hardware, 1, 1, Params::RasterOrderOptions::Heuristic,
                      Params::ReductionMode::Deterministic, Params::DecompositionMode::Heuristic, nullptr);
    std::printf("%d\n", params.divmod_splits_.divisor == 1 && params.sk_units_ == 0);
  }
}
