// What CUDA's headers ask of a compiler: nothing, as no kernel is compiled here.
#pragma once
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
