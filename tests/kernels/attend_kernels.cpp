// The kernels of attention for one format, ROW, and heads of up to WIDTH numbers.

#include "on_host.hpp"
//
#include "attend.cu"
#include "attend_backward.cu"
#include "attend_weights.cu"

const Kernel kernels[] = {Deduced<&attend>::of, Deduced<&attend_backward>::of,
                          Deduced<&attend_weights>::of};
