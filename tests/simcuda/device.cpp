// Queues and schedules.
#include "device.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

namespace simcuda {

namespace {

constexpr int poison = 0xFB;
constexpr size_t page = 4096;

using Clock = std::chrono::steady_clock;

Clock::time_point point(double seconds) {
  return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

// A child made by fork finds the mutex free: other threads of the parent may have held it.
World* make_world() {
  static World* made;
  made = new World;
  pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); }, [] { made->mutex.unlock(); });
  return made;
}

bool ready(const Stream& stream) {
  if (stream.queue.empty() || stream.busy) return false;
  const Operation& front = stream.queue.front();
  return front.kind != Kind::wait || happened(*front.record);
}

void apply(const Operation& operation) {
  const char* src = operation.staged ? operation.staged->data() : operation.src;
  const size_t src_pitch = operation.staged ? operation.width : operation.src_pitch;
  if (operation.kind <= Kind::h2h)
    for (size_t row = 0; row < operation.height; ++row)
      memmove(operation.dst + row * operation.dst_pitch, src + row * src_pitch, operation.width);
  if (operation.kind == Kind::memset) memset(operation.dst, operation.value, operation.width);
  if (operation.call) operation.call();
}

void sleep_until(Lock& lock, Stream& stream, double end) {
  while (!world().flushing && now() < end) stream.wake.wait_until(lock, point(end));
}

void tell_waiters(const Stream& stream) {
  for (Waiter* waiter : world().waiters)
    if (waiter->stream == &stream && waiter->position <= stream.finished) waiter->done.notify_one();
}

void wait_for(Lock& lock, Stream* stream, uint64_t position) {
  Waiter waiter{stream, position, {}};
  auto& waiters = world().waiters;
  waiters.push_back(&waiter);
  while (stream->finished < position) waiter.done.wait(lock);
  waiters.erase(std::find(waiters.begin(), waiters.end(), &waiter));
}

// Runs the first operation of a stream, which is ready. Under `timed` the bytes move half-way through, so that moving
// them takes no time of its own, and ends add up on the stream's own clock, so that oversleeping does not.
void run_front(Lock& lock, Stream& stream) {
  Operation& operation = stream.queue.front();
  const bool timed = world().schedule == Schedule::timed;
  double start = std::max(stream.clock, operation.issued);
  if (operation.kind == Kind::wait) start = std::max(start, operation.record->end);
  const double end = start + operation.seconds;
  stream.busy = true;
  if (timed) sleep_until(lock, stream, (start + end) / 2);
  const bool unlock = timed || operation.call;
  if (unlock) lock.unlock();
  apply(operation);
  if (unlock) lock.lock();
  if (timed) sleep_until(lock, stream, end);
  stream.clock = end;
  if (operation.kind == Kind::record) operation.record->end = end;
  stream.queue.pop_front();
  stream.finished += 1;
  stream.busy = false;
  tell_waiters(stream);
}

void live(Stream* stream) {
  prctl(PR_SET_TIMERSLACK, 1);
  Lock lock(world().mutex);
  for (;;) {
    while (stream->queue.empty() || stream->busy || world().schedule != Schedule::timed) stream->wake.wait(lock);
    const auto record = stream->queue.front().kind == Kind::wait ? stream->queue.front().record : nullptr;
    if (record) wait_for(lock, record->stream, record->position);
    if (ready(*stream)) run_front(lock, *stream);
  }
}

void start_or_wake(Stream* stream) {
  if (stream->has_thread) return stream->wake.notify_one();
  stream->has_thread = true;
  std::thread(live, stream).detach();
}

bool run_side_stream(Lock& lock) {
  for (size_t i = 0; i < world().streams.size(); ++i) {
    Stream& stream = *world().streams[i];
    if (!stream.null && ready(stream)) return run_front(lock, stream), true;
  }
  return false;
}

// A stream that the seed picks. Each stream has a weight, so that some seeds starve some streams for long.
Stream* pick() {
  World& w = world();
  uint64_t total = 0;
  for (Stream* stream : w.streams) {
    if (!stream->queue.empty() && !stream->weight) stream->weight = 1u << (2 * (w.generator() % 4));
    if (ready(*stream)) total += stream->weight;
  }
  if (!total) return nullptr;
  uint64_t ticket = w.generator() % total;
  for (Stream* stream : w.streams) {
    if (!ready(*stream)) continue;
    if (ticket < stream->weight) return stream;
    ticket -= stream->weight;
  }
  return nullptr;
}

bool chance(double probability) { return (world().generator() >> 11) * 0x1p-53 < probability; }

bool run_picked(Lock& lock) {
  Stream* stream = pick();
  if (stream) run_front(lock, *stream);
  return stream;
}

Stream* oldest() {
  Stream* found = nullptr;
  for (Stream* stream : world().streams)
    if (ready(*stream) && (!found || stream->queue.front().serial < found->queue.front().serial)) found = stream;
  return found;
}

// Runs what the stream needs to get to the position, or waits for the thread that is running it.
void advance(Lock& lock, Stream* stream) {
  for (;;) {
    if (stream->busy) return wait_for(lock, stream, stream->finished + 1);
    if (ready(*stream)) return run_front(lock, *stream);
    stream = stream->queue.front().record->stream;  // finite: a record is older than what waits for it
  }
}

}  // namespace

World& world() {
  static World* the_world = make_world();
  return *the_world;
}

int64_t thread_id() { return syscall(SYS_gettid); }

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

Stream* new_stream(int device, bool null, unsigned flags, int priority) {
  auto* stream = new Stream;
  stream->device = device;
  stream->null = null;
  stream->flags = flags;
  stream->priority = priority;
  world().streams.push_back(stream);
  return stream;
}

char* allocate(Lock& lock, size_t bytes, int device) {
  World& w = world();
  bytes = (bytes + page - 1) / page * page;
  char* memory = nullptr;
  auto found = w.spare.find({bytes, device});
  if (found != w.spare.end()) {
    memory = found->second;
    w.spare.erase(found);
  } else {
    lock.unlock();
    memory = static_cast<char*>(std::aligned_alloc(page, bytes));
    if (memory) memset(memory, poison, bytes);
    lock.lock();
    if (!memory) return nullptr;
  }
  w.blocks[reinterpret_cast<uintptr_t>(memory)] = {bytes, device, false};
  if (device >= 0) w.allocated[device] += bytes;
  return memory;
}

void release(char* memory) {
  World& w = world();
  auto found = w.blocks.find(reinterpret_cast<uintptr_t>(memory));
  const Block block = found->second;
  w.blocks.erase(found);
  if (block.registered) return;
  if (block.device >= 0) w.allocated[block.device] -= block.bytes;
  memset(memory, poison, block.bytes);
  w.spare.insert({{block.bytes, block.device}, memory});
}

const Block* find(const void* pointer, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = world().blocks.upper_bound(address);
  if (next == world().blocks.begin()) return nullptr;
  const auto& [start, block] = *--next;
  return address + bytes <= start + block.bytes ? &block : nullptr;
}

bool happened(const Record& record) { return record.stream->finished >= record.position; }

void note(Kind kind, const Stream* stream, int device, const Operation& o) {
  world().log.push_back({static_cast<int32_t>(kind), device, stream ? stream->handle() : 0, thread_id(),
                         o.width * o.height, reinterpret_cast<uint64_t>(o.dst), reinterpret_cast<uint64_t>(o.src),
                         o.pinned, o.blocking, o.name});
}

uint64_t enqueue(Lock& lock, Stream* stream, Operation operation) {
  World& w = world();
  note(operation.kind, stream, stream->device, operation);
  operation.serial = ++w.serial;
  operation.issued = now();
  stream->queue.push_back(std::move(operation));
  const uint64_t position = ++stream->enqueued;
  if (stream->queue.back().record && stream->queue.back().kind == Kind::record)
    stream->queue.back().record->position = position;
  if (w.schedule == Schedule::timed) start_or_wake(stream);
  let_progress(lock);
  return position;
}

void finish(Lock& lock, Stream* stream, uint64_t position) {
  World& w = world();
  while (stream->finished < position) {
    if (w.schedule == Schedule::timed) wait_for(lock, stream, position);
    else if (w.schedule != Schedule::random || !run_picked(lock)) advance(lock, stream);
    if (w.schedule == Schedule::ahead) let_progress(lock);
  }
}

void finish_device(Lock& lock, int device) {
  for (size_t i = 0; i < world().streams.size(); ++i) {
    Stream* stream = world().streams[i];
    if (stream->device == device) finish(lock, stream, stream->enqueued);
  }
}

void finish_all(Lock& lock) {
  for (size_t device = 0; device < world().null_streams.size(); ++device) finish_device(lock, device);
}

void drain(Lock& lock) {
  World& w = world();
  w.flushing = true;
  for (Stream* stream : w.streams) stream->wake.notify_one();
  finish_all(lock);
  w.flushing = false;
}

bool step(Lock& lock) {
  World& w = world();
  if (w.schedule == Schedule::random) return run_picked(lock);
  Stream* stream = oldest();
  if (!stream) return false;
  run_front(lock, *stream);
  let_progress(lock);
  return true;
}

void let_progress(Lock& lock) {
  World& w = world();
  if (w.schedule == Schedule::ahead) while (run_side_stream(lock)) {}
  if (w.schedule == Schedule::random) while (chance(w.eagerness) && run_picked(lock)) {}
}

}  // namespace simcuda
