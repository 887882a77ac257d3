// The simulated device: what it holds, and when it does its work.
//
// Guarantees
// - A stream runs its operations in order. A wait runs after the record that it captured when it was called.
//   Nothing else is ordered: the null stream does not wait for other streams (torch's are all non-blocking).
// - Bytes move when an operation runs, not when it is called. Pinned sources are read then; a pageable source is
//   read at the call. New and freed memory holds poison, so reading too early or too late gives a wrong value.
// - An operation runs when the schedule says so:
//     late    only when a host wait needs it: the waited-for operations and what they wait for, no others;
//     ahead   on a side stream as soon as it is ready, on a null stream only when a host wait needs it;
//     random  a seed decides at each call, the same for the same sequence of calls;
//     timed   at its time: one thread a stream, copies take bytes / bandwidth, spin kernels take their cycles.
// - One mutex guards everything. It is not held while a host function runs, while new memory is poisoned, nor while
//   bytes move under `timed`.
// - Streams, threads and the world itself are never destroyed, so the process can exit with work queued.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <unordered_map>
#include <vector>

#include <cuda_runtime_api.h>

namespace simcuda {

using Lock = std::unique_lock<std::mutex>;

enum class Schedule { late, ahead, random, timed };
enum class Kind { h2d, d2h, d2d, h2h, memset, kernel, record, wait, host_function, host_wait, alloc, free,
                  host_alloc, host_free };

struct Stream;

// One call of cudaEventRecord: a place in a stream. It has happened once the stream has finished that many operations.
struct Record {
  Stream* stream;
  uint64_t position;
  double end = 0;  // [seconds] on the clock of the device
};

// What Python sees of an operation. The layout is repeated in __init__.py.
struct LogEntry {
  int32_t kind, device;
  uint64_t stream;
  int64_t thread;
  uint64_t nbytes, dst, src;
  int32_t pinned, blocking;
  const char* name;
};

struct Operation {
  explicit Operation(Kind kind) : kind(kind) {}
  Kind kind;
  char* dst = nullptr;
  const char* src = nullptr;
  size_t width = 0, height = 1, dst_pitch = 0, src_pitch = 0;
  int value = 0;
  bool pinned = false, pageable = false, blocking = false;
  double seconds = 0;                         // how long it takes under `timed`
  const char* name = "";
  std::shared_ptr<std::vector<char>> staged;  // the snapshot of a pageable source
  std::shared_ptr<Record> record;
  std::function<void()> call;
  double issued = 0;
  uint64_t serial = 0;
};

// A capture under way, and, once ended, the graph that it made. A graph runs in the order of the captured calls, which
// is one of the right ones; work that was on two streams does not overlap in it.
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  int64_t thread;
  Stream* origin;
  bool invalid = false, ended = false;
  std::vector<Operation> operations = {};
};

struct Stream {
  int device;
  bool null;
  unsigned flags = 0;
  int priority = 0;
  std::deque<Operation> queue;
  uint64_t enqueued = 0, finished = 0;
  double clock = 0;  // when the last operation that ran had ended [seconds]
  bool busy = false, has_thread = false;
  unsigned weight = 0;  // under `random`; 0: not drawn since the last reset
  std::condition_variable wake;
  std::shared_ptr<Capture> capture;
  uint64_t handle() const { return null ? 0 : reinterpret_cast<uint64_t>(this); }
};

struct Event {
  int device;
  unsigned flags;
  std::shared_ptr<Record> record;
  std::shared_ptr<Capture> capture;  // of the last record, where that was captured
};

struct Block {
  size_t bytes;
  int device;  // -1: pinned host memory
  bool registered;
};

struct Waiter {
  Stream* stream;
  uint64_t position;
  std::condition_variable done;
};

struct Counters {
  uint64_t h2d, d2h, d2d, pageable, h2d_bytes, host_waits, stream_waits, event_records, event_queries, host_allocs,
      device_mallocs, kernels, memsets;
};

struct World {
  std::mutex mutex;
  Schedule schedule = Schedule::late;
  bool flushing = false;  // nothing takes time while a reset drains the queues
  double bandwidth = 1e9, eagerness = 0.5;
  std::mt19937_64 generator;
  std::vector<Stream*> streams;
  std::vector<Stream*> null_streams;  // one a device
  std::vector<uint64_t> allocated;    // bytes, one a device
  uint64_t contexts = 0;              // bit set of devices
  std::map<uintptr_t, Block> blocks;
  std::multimap<std::pair<size_t, int>, char*> spare;  // freed blocks: poisoned, never unmapped
  std::vector<Waiter*> waiters;
  std::vector<std::weak_ptr<Capture>> captures;
  std::unordered_map<const void*, const char*> kernels;
  Counters counters{};
  std::vector<LogEntry> log;
  uint64_t serial = 0;
};

World& world();
int64_t thread_id();
double now();

Stream* new_stream(int device, bool null, unsigned flags = 0, int priority = 0);

// Memory. `find` gives the block that holds all of the range, or null.
char* allocate(Lock& lock, size_t bytes, int device);
void release(char* memory);
const Block* find(const void* pointer, size_t bytes = 1);

// Work. `enqueue` returns the operation's position; `finish` returns once the stream has finished that many.
uint64_t enqueue(Lock& lock, Stream* stream, Operation operation);
void finish(Lock& lock, Stream* stream, uint64_t position);
void finish_device(Lock& lock, int device);
void finish_all(Lock& lock);
void drain(Lock& lock);
bool step(Lock& lock);  // run one ready operation, if there is one
void let_progress(Lock& lock);
bool happened(const Record& record);
void note(Kind kind, const Stream* stream, int device, const Operation& operation);

}  // namespace simcuda
