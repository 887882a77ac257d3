/* A stand-in for the CUDA toolkit's crt/host_defines.h, which the runtime's wheel leaves out.
   The runtime's headers only need these words to exist; a host compiler needs nothing from them. */
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __host__
#define __device__
#define __global__
#define __managed__
#define __constant__
#define __shared__
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __location__(a)
#define __forceinline__ inline
#define __no_return__ __attribute__((noreturn))
#define __noinline__ __attribute__((noinline))
