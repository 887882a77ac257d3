// The CUDA runtime API, as far as torch uses it, over the simulated device. Names and meanings are NVIDIA's.
#include "device.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

using namespace simcuda;

namespace {

constexpr size_t memory_bytes = size_t{4} << 30;
constexpr int multiprocessors = 132;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int device_count() { return static_cast<int>(world().null_streams.size()); }

void use(int device) { world().contexts |= uint64_t{1} << device; }

// The handles 1 and 2 (legacy, per thread) are taken for the null stream.
Stream* resolve(cudaStream_t handle) {
  const bool null = reinterpret_cast<uintptr_t>(handle) <= 2;
  Stream* stream = null ? world().null_streams[current_device] : reinterpret_cast<Stream*>(handle);
  use(stream->device);
  return stream;
}

Event* resolve(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

// ---- Captures: which calls they forbid --------------------------------------------------------------------------

std::vector<std::shared_ptr<Capture>> captures_under_way() {
  std::vector<std::shared_ptr<Capture>> found;
  for (auto& weak : world().captures)
    if (auto capture = weak.lock(); capture && !capture->ended) found.push_back(capture);
  return found;
}

bool forbids(const Capture& capture) {
  if (capture_mode == cudaStreamCaptureModeRelaxed || capture.mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == thread_id()) return true;
  return capture_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

// For calls that may not be made while a capture is under way: allocation, queries, waits. They break that capture.
cudaError_t unsafe_call() {
  if (world().captures.empty()) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  for (auto& capture : captures_under_way())
    if (forbids(*capture)) capture->invalid = true, error = cudaErrorStreamCaptureUnsupported;
  return error;
}

cudaError_t refuse_captured(const Stream& stream) {
  if (!stream.capture) return cudaSuccess;
  stream.capture->invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_captured_device(int device) {
  cudaError_t error = cudaSuccess;
  for (Stream* stream : world().streams)
    if (stream->device == device && refuse_captured(*stream) != cudaSuccess) error = cudaErrorStreamCaptureUnsupported;
  return error;
}

// ---- Handing work to a stream -----------------------------------------------------------------------------------

void count(const Operation& o) {
  Counters& c = world().counters;
  const uint64_t bytes = o.width * o.height;
  if (o.kind == Kind::h2d) c.h2d += 1, c.h2d_bytes += bytes, c.pageable += o.pageable;
  if (o.kind == Kind::d2h) c.d2h += 1;
  if (o.kind == Kind::d2d) c.d2d += 1;
  if (o.kind == Kind::memset) c.memsets += 1;
  if (o.kind == Kind::kernel) c.kernels += 1;
  if (o.kind == Kind::record) c.event_records += 1;
  if (o.kind == Kind::wait) c.stream_waits += 1;
}

// Queues an operation, or, on a capturing stream, puts it into the graph. A graph reads its sources when it runs.
cudaError_t submit(Lock& lock, Stream* stream, Operation operation) {
  if (Capture* capture = stream->capture.get()) {
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    capture->operations.push_back(std::move(operation));
    return cudaSuccess;
  }
  count(operation);
  enqueue(lock, stream, std::move(operation));
  return cudaSuccess;
}

bool on_device(const Block* block) { return block && block->device >= 0; }

std::shared_ptr<std::vector<char>> snapshot(const Operation& o) {
  auto bytes = std::make_shared<std::vector<char>>();
  bytes->reserve(o.width * o.height);
  for (size_t row = 0; row < o.height; ++row)
    bytes->insert(bytes->end(), o.src + row * o.src_pitch, o.src + row * o.src_pitch + o.width);
  return bytes;
}

bool agrees(cudaMemcpyKind asked, Kind is) {
  return asked == cudaMemcpyDefault || static_cast<int>(asked) == (is == Kind::h2d   ? cudaMemcpyHostToDevice
                                                                   : is == Kind::d2h ? cudaMemcpyDeviceToHost
                                                                   : is == Kind::d2d ? cudaMemcpyDeviceToDevice
                                                                                     : cudaMemcpyHostToHost);
}

struct Rows {
  void* dst;
  size_t dst_pitch;
  const void* src;
  size_t src_pitch, width, height;
};

cudaError_t copy(Lock& lock, const Rows& r, cudaMemcpyKind asked, cudaStream_t handle, bool blocking) {
  if (!r.width || !r.height) return cudaSuccess;
  Stream* stream = resolve(handle);
  const Block* to = find(r.dst, (r.height - 1) * r.dst_pitch + r.width);
  const Block* from = find(r.src, (r.height - 1) * r.src_pitch + r.width);
  const Kind kind = on_device(to) ? (on_device(from) ? Kind::d2d : Kind::h2d)
                                  : (on_device(from) ? Kind::d2h : Kind::h2h);
  if (!agrees(asked, kind)) return cudaErrorInvalidValue;
  Operation o{kind};
  o.dst = static_cast<char*>(r.dst), o.src = static_cast<const char*>(r.src);
  o.width = r.width, o.height = r.height, o.dst_pitch = r.dst_pitch, o.src_pitch = r.src_pitch;
  o.pinned = (kind == Kind::h2d && from) || (kind == Kind::d2h && to);
  o.pageable = !from;
  o.seconds = r.width * r.height / world().bandwidth;
  if (!from && !stream->capture) o.staged = snapshot(o);
  if (!to) blocking = true;
  if (stream->capture && blocking) return refuse_captured(*stream);
  cudaError_t error = submit(lock, stream, std::move(o));
  if (error == cudaSuccess && blocking) finish(lock, stream, stream->enqueued);
  return error;
}

cudaError_t set_memory(Lock& lock, void* dst, int value, size_t bytes, cudaStream_t handle, bool blocking) {
  if (!bytes) return cudaSuccess;
  if (!find(dst, bytes)) return cudaErrorInvalidValue;
  Stream* stream = resolve(handle);
  if (stream->capture && blocking) return refuse_captured(*stream);
  Operation o{Kind::memset};
  o.dst = static_cast<char*>(dst), o.width = bytes, o.value = value;
  cudaError_t error = submit(lock, stream, std::move(o));
  if (error == cudaSuccess && blocking) finish(lock, stream, stream->enqueued);
  return error;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t handle) {
  Lock lock(world().mutex);
  Stream* stream = resolve(handle);
  if (stream->device != current_device) return cudaErrorInvalidResourceHandle;
  Operation o{Kind::kernel};
  auto named = world().kernels.find(function);
  if (named != world().kernels.end()) o.name = named->second;
  if (strstr(o.name, "spin_kernel")) o.seconds = *static_cast<int64_t*>(arguments[0]) * 1e-9;
  return submit(lock, stream, std::move(o));
}

cudaError_t host_function(cudaStream_t handle, std::function<void()> call) {
  Lock lock(world().mutex);
  Operation o{Kind::host_function};
  o.call = std::move(call);
  return submit(lock, resolve(handle), std::move(o));
}

// ---- Waiting ----------------------------------------------------------------------------------------------------

void note_host_wait(const Stream* stream, int device, const char* what, bool blocking = false) {
  world().counters.host_waits += 1;
  Operation o{Kind::host_wait};
  o.name = what, o.blocking = blocking;
  note(Kind::host_wait, stream, device, o);
}

bool blocks(const Event& event) { return event.flags & cudaEventBlockingSync; }

cudaError_t record_event(cudaEvent_t handle, cudaStream_t stream_handle) {
  Lock lock(world().mutex);
  Event* event = resolve(handle);
  Stream* stream = resolve(stream_handle);
  if (event->device != stream->device) return cudaErrorInvalidResourceHandle;
  event->capture = stream->capture;
  if (stream->capture) return stream->capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  event->record = std::make_shared<Record>(Record{stream, 0});
  Operation o{Kind::record};
  o.record = event->record, o.blocking = blocks(*event);
  return submit(lock, stream, std::move(o));
}

cudaError_t wait_event(cudaStream_t handle, cudaEvent_t event_handle) {
  Lock lock(world().mutex);
  Event* event = resolve(event_handle);
  Stream* stream = resolve(handle);
  if (event->capture) {
    if (event->capture->ended) return cudaErrorCapturedEvent;
    if (stream->capture && stream->capture != event->capture) return cudaErrorStreamCaptureMerge;
    stream->capture = event->capture;
    return cudaSuccess;
  }
  if (!event->record) return cudaSuccess;
  if (stream->capture) return stream->capture->invalid = true, cudaErrorStreamCaptureIsolation;
  Operation o{Kind::wait};
  o.record = event->record, o.blocking = blocks(*event);
  return submit(lock, stream, std::move(o));
}

cudaError_t query_event(Event* event) {
  Lock lock(world().mutex);
  world().counters.event_queries += 1;
  if (event->capture) return event->capture->invalid = true, cudaErrorCapturedEvent;
  if (cudaError_t error = unsafe_call()) return error;
  let_progress(lock);
  return !event->record || happened(*event->record) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t synchronize_event(Event* event) {
  Lock lock(world().mutex);
  const auto record = event->record;
  note_host_wait(record ? record->stream : nullptr, event->device, "event", blocks(*event));
  if (event->capture) return event->capture->invalid = true, cudaErrorCapturedEvent;
  if (cudaError_t error = unsafe_call()) return error;
  if (record) finish(lock, record->stream, record->position);
  return cudaSuccess;
}

cudaError_t make_event(cudaEvent_t* event, unsigned flags) {
  Lock lock(world().mutex);
  use(current_device);
  *event = reinterpret_cast<cudaEvent_t>(new Event{current_device, flags, nullptr, nullptr});
  return cudaSuccess;
}

cudaError_t make_stream(cudaStream_t* stream, unsigned flags, int priority) {
  Lock lock(world().mutex);
  use(current_device);
  *stream = reinterpret_cast<cudaStream_t>(new_stream(current_device, false, flags, priority));
  return cudaSuccess;
}

// ---- Memory -----------------------------------------------------------------------------------------------------

cudaError_t allocate_noted(Lock& lock, void** pointer, size_t bytes, int device, Kind kind) {
  use(current_device);
  if (cudaError_t error = unsafe_call()) return error;
  if (!bytes) return *pointer = nullptr, cudaSuccess;
  if (device >= 0 && world().allocated[device] + bytes > memory_bytes) return cudaErrorMemoryAllocation;
  *pointer = allocate(lock, bytes, device);
  if (!*pointer) return cudaErrorMemoryAllocation;
  Operation o{kind};
  o.dst = static_cast<char*>(*pointer), o.width = bytes;
  note(kind, nullptr, device, o);
  return cudaSuccess;
}

// Frees wait for all work on all devices, as the real ones do for theirs. That is no host wait of the caller's.
cudaError_t free_noted(Lock& lock, void* pointer, Kind kind) {
  if (!pointer) return cudaSuccess;
  if (cudaError_t error = unsafe_call()) return error;
  finish_all(lock);
  auto found = world().blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == world().blocks.end() || (found->second.device < 0) == (kind == Kind::free)) return cudaErrorInvalidValue;
  Operation o{kind};
  o.dst = static_cast<char*>(pointer), o.width = found->second.bytes;
  note(kind, nullptr, found->second.device, o);
  release(static_cast<char*>(pointer));
  return cudaSuccess;
}

void describe(cudaDeviceProp* p, int device) {
  *p = {};
  strcpy(p->name, "Simulated device");
  p->uuid.bytes[0] = static_cast<char>(device + 1);
  p->totalGlobalMem = memory_bytes;
  p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 227 << 10, p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536, p->textureAlignment = 512, p->memPitch = 0x7fffffff;
  p->major = 9, p->minor = 0, p->multiProcessorCount = multiprocessors;
  p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = p->streamPrioritiesSupported = 1;
  p->asyncEngineCount = 3, p->pciBusID = device + 1, p->l2CacheSize = 50 << 20, p->memoryBusWidth = 5120;
  p->canUseHostPointerForRegisteredMem = p->hostRegisterSupported = p->cooperativeLaunch = 1;
  p->maxBlocksPerMultiProcessor = 32;
}

int attribute(const cudaDeviceProp& p, cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return p.major;
    case cudaDevAttrComputeCapabilityMinor: return p.minor;
    case cudaDevAttrMultiProcessorCount: return p.multiProcessorCount;
    case cudaDevAttrMaxThreadsPerBlock: return p.maxThreadsPerBlock;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return p.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxSharedMemoryPerBlock: return static_cast<int>(p.sharedMemPerBlock);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return static_cast<int>(p.sharedMemPerBlockOptin);
    case cudaDevAttrMaxGridDimX: return p.maxGridSize[0];
    case cudaDevAttrMaxGridDimY: return p.maxGridSize[1];
    case cudaDevAttrWarpSize: return p.warpSize;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrCooperativeLaunch: return 1;
    default: return 0;
  }
}

// A graph and its executable form are both a pointer to a shared Capture.
using Graph = std::shared_ptr<Capture>;
Graph& graph(void* handle) { return *static_cast<Graph*>(handle); }

}  // namespace

extern "C" {

// ---- Device -----------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* n) { return *n = device_count(), cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return result(cudaErrorInvalidDevice);
  Lock lock(world().mutex);
  use(current_device = device);  // since CUDA 12 this alone makes a context
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= device_count()) return result(cudaErrorInvalidDevice);
  return describe(p, device), cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  cudaDeviceProp p;
  describe(&p, device);
  return *value = attribute(p, which), cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  return snprintf(text, length, "0000:%02x:00.0", device + 1), cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) { return *can = device != peer, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Lock lock(world().mutex);
  use(current_device);
  note_host_wait(nullptr, current_device, "device");
  if (cudaError_t error = unsafe_call()) return result(error);
  if (cudaError_t error = refuse_captured_device(current_device)) return result(error);
  return finish_device(lock, current_device), cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(world().mutex);
  use(current_device);
  return *total = memory_bytes, *free = memory_bytes - world().allocated[current_device], cudaSuccess;
}

// ---- Errors -----------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureMerge: return "cudaErrorStreamCaptureMerge";
    case cudaErrorStreamCaptureUnmatched: return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorStreamCaptureWrongThread: return "cudaErrorStreamCaptureWrongThread";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    default: return "an error that the simulated device has no name for";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// ---- Memory -----------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Lock lock(world().mutex);
  world().counters.device_mallocs += 1;
  return result(allocate_noted(lock, pointer, bytes, current_device, Kind::alloc));
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  Lock lock(world().mutex);
  world().counters.host_allocs += 1;
  return result(allocate_noted(lock, pointer, bytes, -1, Kind::host_alloc));
}
cudaError_t cudaFree(void* pointer) {
  Lock lock(world().mutex);
  return result(free_noted(lock, pointer, Kind::free));
}
cudaError_t cudaFreeHost(void* pointer) {
  Lock lock(world().mutex);
  return result(free_noted(lock, pointer, Kind::host_free));
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Lock lock(world().mutex);
  use(current_device);
  if (cudaError_t error = unsafe_call()) return result(error);
  if (find(pointer)) return result(cudaErrorHostMemoryAlreadyRegistered);
  world().blocks[reinterpret_cast<uintptr_t>(pointer)] = {bytes, -1, true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  Lock lock(world().mutex);
  const Block* block = find(pointer);
  if (!block || !block->registered) return result(cudaErrorHostMemoryNotRegistered);
  finish_all(lock);
  return release(static_cast<char*>(pointer)), cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Lock lock(world().mutex);
  const Block* block = find(pointer);
  *attributes = {};
  attributes->type = on_device(block) ? cudaMemoryTypeDevice : block ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->device = !block ? -2 : std::max(block->device, 0);
  if (block) attributes->devicePointer = const_cast<void*>(pointer);
  if (!on_device(block)) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
  Lock lock(world().mutex);
  if (cudaError_t error = unsafe_call()) return result(error);
  return result(copy(lock, {dst, bytes, src, bytes, bytes, 1}, kind, nullptr, true));
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  Lock lock(world().mutex);
  return result(copy(lock, {dst, bytes, src, bytes, bytes, 1}, kind, stream, false));
}
cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t bytes, cudaStream_t stream) {
  Lock lock(world().mutex);
  return result(copy(lock, {dst, bytes, src, bytes, bytes, 1}, cudaMemcpyDefault, stream, false));
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  Lock lock(world().mutex);
  return result(copy(lock, {dst, dst_pitch, src, src_pitch, width, height}, kind, stream, false));
}
cudaError_t cudaMemset(void* dst, int value, size_t bytes) {
  Lock lock(world().mutex);
  if (cudaError_t error = unsafe_call()) return result(error);
  return result(set_memory(lock, dst, value, bytes, nullptr, true));
}
cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes, cudaStream_t stream) {
  Lock lock(world().mutex);
  return result(set_memory(lock, dst, value, bytes, stream, false));
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  return *pointer = const_cast<void*>(symbol), cudaSuccess;
}

// ---- Streams ----------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make_stream(stream, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return make_stream(stream, flags, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return make_stream(stream, flags, std::clamp(priority, -5, 0));
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its work goes on; its records stay valid
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  Lock lock(world().mutex);
  return *priority = resolve(stream)->priority, cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  Lock lock(world().mutex);
  return *flags = resolve(stream)->flags, cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  Lock lock(world().mutex);
  return *device = resolve(stream)->device, cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Lock lock(world().mutex);
  Stream* stream = resolve(handle);
  if (cudaError_t error = refuse_captured(*stream)) return result(error);
  if (cudaError_t error = unsafe_call()) return result(error);
  let_progress(lock);
  return result(stream->finished == stream->enqueued ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Lock lock(world().mutex);
  Stream* stream = resolve(handle);
  note_host_wait(stream, stream->device, "stream");
  if (cudaError_t error = refuse_captured(*stream)) return result(error);
  if (cudaError_t error = unsafe_call()) return result(error);
  return finish(lock, stream, stream->enqueued), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return result(wait_event(stream, event));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return result(host_function(stream, [=] { function(data); }));
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  return result(host_function(stream, [=] { function(stream, cudaSuccess, data); }));
}

// ---- Events -----------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreate(cudaEvent_t* event) { return make_event(event, 0); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) { return make_event(event, flags); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Lock lock(world().mutex);
  return delete resolve(event), cudaSuccess;  // what waits for its record keeps that
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return result(record_event(event, stream)); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return result(record_event(event, stream));
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return result(query_event(resolve(event))); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return result(synchronize_event(resolve(event))); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Lock lock(world().mutex);
  const Event &a = *resolve(start), &b = *resolve(end);
  if (!a.record || !b.record || ((a.flags | b.flags) & cudaEventDisableTiming))
    return result(cudaErrorInvalidResourceHandle);
  if (!happened(*a.record) || !happened(*b.record)) return result(cudaErrorNotReady);
  return *milliseconds = static_cast<float>((b.record->end - a.record->end) * 1e3), cudaSuccess;
}

// ---- Kernels ----------------------------------------------------------------------------------------------------

struct LaunchShape {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local LaunchShape pushed;

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*,
                                      void*, int*) {
  Lock lock(world().mutex);
  world().kernels[host] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  return pushed = {grid, block, shared, stream}, 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  return *static_cast<void**>(stream) = pushed.stream, cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                         cudaStream_t stream) {
  return result(launch(kernel, arguments, stream));
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return result(launch(function, arguments, stream));
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return result(launch(function, arguments, config->stream));
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  return result(launch(function, arguments, stream));
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024, attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}

// ---- Captures and graphs ----------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, capture_mode), cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static unsigned long long captures = 0;
  Lock lock(world().mutex);
  Stream* stream = resolve(handle);
  if (stream->null) return result(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return result(cudaErrorIllegalState);
  stream->capture = std::make_shared<Capture>(Capture{++captures, mode, thread_id(), stream});
  world().captures.push_back(stream->capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* made) {
  Lock lock(world().mutex);
  Stream* stream = resolve(handle);
  const Graph capture = stream->capture;
  *made = nullptr;
  if (!capture || capture->origin != stream) return result(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != thread_id())
    return result(cudaErrorStreamCaptureWrongThread);
  capture->ended = true;
  for (Stream* other : world().streams)
    if (other->capture == capture) other->capture = nullptr;
  auto& all = world().captures;
  all.erase(std::remove_if(all.begin(), all.end(), [&](auto& weak) { return weak.lock() == capture; }), all.end());
  if (capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
  *made = reinterpret_cast<cudaGraph_t>(new Graph(capture));
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* n) {
  Lock lock(world().mutex);
  // Asking makes no context.
  const bool null = reinterpret_cast<uintptr_t>(handle) <= 2;
  const Capture* capture = null ? nullptr : reinterpret_cast<Stream*>(handle)->capture.get();
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  if (id && capture) *id = capture->id;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                unsigned) {
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* n) {
  const size_t size = graph(handle)->operations.size();
  if (nodes) std::fill_n(nodes, std::min(*n, size), nullptr);
  return *n = size, cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t handle, unsigned long long) {
  return *made = reinterpret_cast<cudaGraphExec_t>(new Graph(graph(handle))), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  Lock lock(world().mutex);
  for (const Operation& operation : graph(handle)->operations)
    if (cudaError_t error = submit(lock, resolve(stream), operation)) return result(error);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t handle) { return delete &graph(handle), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) { return delete &graph(handle), cudaSuccess; }
cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void*, cudaHostFn_t, unsigned, unsigned) {
  return *made = nullptr, cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }

}  // extern "C"
