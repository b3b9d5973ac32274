// The kernels for one pair of formats, ROW and CELL, in the order that host.cpp is asked by.

#include "on_host.hpp"
//
#include "paged_copy.cu"
#include "paged_gather.cu"
#include "paged_scatter.cu"
#include "rerotate.cu"
#include "scatter_fused_recompute.cu"

const Kernel kernels[] = {Deduced<&paged_copy>::of, Deduced<&paged_gather>::of,
                          Deduced<&paged_scatter>::of, Deduced<&rerotate>::of,
                          Deduced<&scatter_fused_recompute>::of};
