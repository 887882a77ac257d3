// What the tests' Python calls, through ctypes. The layouts are repeated in __init__.py.
#include "device.hpp"

#include <algorithm>

using namespace simcuda;

extern "C" {

void simcuda_start(int devices) {
  Lock lock(world().mutex);
  for (int device = 0; device < devices; ++device) world().null_streams.push_back(new_stream(device, true));
  world().allocated.resize(devices);
}

void simcuda_reset(int schedule, uint64_t seed, double bandwidth) {
  World& w = world();
  Lock lock(w.mutex);
  drain(lock);
  w.counters = {};
  w.log.clear();
  w.generator.seed(seed);
  w.eagerness = (w.generator() % 16) / 16.0;
  for (Stream* stream : w.streams) stream->weight = 0, stream->clock = 0;
  w.bandwidth = bandwidth;
  w.schedule = static_cast<Schedule>(schedule);
}

void simcuda_counters(Counters* counters) {
  Lock lock(world().mutex);
  *counters = world().counters;
}

uint64_t simcuda_log(LogEntry* entries, uint64_t room) {
  Lock lock(world().mutex);
  std::copy_n(world().log.begin(), std::min<uint64_t>(room, world().log.size()), entries);
  return world().log.size();
}

uint64_t simcuda_device_bytes(int device) {
  Lock lock(world().mutex);
  return world().allocated[device];
}

uint64_t simcuda_contexts() {
  Lock lock(world().mutex);
  return world().contexts;
}

// `handle` 0 is the null stream of `device`; all streams where `device` is -1.
uint64_t simcuda_pending(uint64_t handle, int device) {
  Lock lock(world().mutex);
  uint64_t pending = 0;
  for (Stream* stream : world().streams)
    if (device < 0 || (stream->handle() == handle && (handle || stream->device == device)))
      pending += stream->enqueued - stream->finished;
  return pending;
}

// Under `timed` the streams run by themselves: this waits for all of them.
void simcuda_run(uint64_t n) {
  Lock lock(world().mutex);
  if (world().schedule == Schedule::timed) finish_all(lock);
  else while (n-- && step(lock)) {}
}

}  // extern "C"
