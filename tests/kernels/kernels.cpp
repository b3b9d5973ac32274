// The kernels for one pair of formats, ROW and CELL, in the order that host.cpp is asked by.

#include "on_host.hpp"
//
#include "pack_int4.cu"
#include "paged_copy.cu"
#include "paged_gather.cu"
#include "paged_scatter.cu"
#include "rerotate.cu"
#include "scatter_fused_recompute.cu"
#include "unpack_int4.cu"

const Kernel kernels[] = {Deduced<&paged_copy>::of, Deduced<&paged_gather>::of,
                          Deduced<&paged_scatter>::of, Deduced<&rerotate>::of,
                          Deduced<&scatter_fused_recompute>::of, Deduced<&pack_int4>::of,
                          Deduced<&unpack_int4>::of};
