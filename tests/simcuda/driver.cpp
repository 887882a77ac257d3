// The few calls of the CUDA driver API that torch makes for itself. Answers are its integers: cuda.h is not needed.
#include "device.hpp"

#include <cstring>

using namespace simcuda;

namespace {

constexpr int success = 0, invalid_device = 101, not_supported = 801;

int no_such_call(...) { return not_supported; }

bool has_context(int device) {
  Lock lock(world().mutex);
  return world().contexts >> device & 1;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return success; }
int cuDriverGetVersion(int* version) { return *version = CUDART_VERSION, success; }
int cuDeviceGetCount(int* n) { return *n = static_cast<int>(world().null_streams.size()), success; }
int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= static_cast<int>(world().null_streams.size())) return invalid_device;
  return *device = ordinal, success;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  return *flags = 0, *active = has_context(device), success;
}
int cuCtxGetCurrent(void** context) {
  int device = 0;
  cudaGetDevice(&device);
  static char contexts[64];  // a context is no more than a place in here
  return *context = has_context(device) ? contexts + device : nullptr, success;
}
int cuGetErrorString(int, const char** text) { return *text = "an error of the simulated driver", success; }
int cuGetErrorName(int, const char** text) { return *text = "simulated driver error", success; }
int cuGetProcAddress_v2(const char*, void** function, int, uint64_t, int* status) {
  *function = nullptr;
  if (status) *status = 1;  // symbol not found
  return 500;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  const bool state = !strcmp(symbol, "cuDevicePrimaryCtxGetState");
  *function = state ? reinterpret_cast<void*>(cuDevicePrimaryCtxGetState) : reinterpret_cast<void*>(no_such_call);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
