//! Sources of the CUDA kernels, embedded in the extension so an installed package needs no data
//! files.
//!
//! Invariant: contains each file of `cuda/` by name. Cost: a dictionary at import.

/// File name and source of every kernel and include.
pub(crate) const KERNELS: [(&str, &str); 15] = [
    ("attend.cu", include_str!("../../../cuda/attend.cu")),
    ("attend.cuh", include_str!("../../../cuda/attend.cuh")),
    ("attend_backward.cu", include_str!("../../../cuda/attend_backward.cu")),
    ("attend_weights.cu", include_str!("../../../cuda/attend_weights.cu")),
    ("int4.cuh", include_str!("../../../cuda/int4.cuh")),
    ("numbers.cuh", include_str!("../../../cuda/numbers.cuh")),
    ("pack_int4.cu", include_str!("../../../cuda/pack_int4.cu")),
    ("paged.cuh", include_str!("../../../cuda/paged.cuh")),
    ("paged_copy.cu", include_str!("../../../cuda/paged_copy.cu")),
    ("paged_gather.cu", include_str!("../../../cuda/paged_gather.cu")),
    ("paged_scatter.cu", include_str!("../../../cuda/paged_scatter.cu")),
    ("rerotate.cu", include_str!("../../../cuda/rerotate.cu")),
    ("scatter_fused_recompute.cu", include_str!("../../../cuda/scatter_fused_recompute.cu")),
    ("tiles.cuh", include_str!("../../../cuda/tiles.cuh")),
    ("unpack_int4.cu", include_str!("../../../cuda/unpack_int4.cu")),
];
