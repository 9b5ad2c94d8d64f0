// Streams are queues with a thread each, events are marks in them: kernels run while the host goes on.
#include "acme.h"

#include <cstdlib>
#include <string>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace acme {
namespace {

constexpr c10::StreamId kStreams = 32;  // then they are given out again, in turn

std::atomic<pid_t> owner{0};  // the process that has the threads

// A count that only grows, and whoever waits for it.
struct Count {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t value = 0;

  void set(uint64_t to) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      value = to;
    }
    changed.notify_all();
  }
  void wait(uint64_t least) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return value >= least; });
  }
  bool reached(uint64_t least) {
    std::lock_guard<std::mutex> lock(mutex);
    return value >= least;
  }
};

struct Queue {
  std::mutex mutex;
  std::condition_variable filled;
  std::deque<Kernel> kernels;
  uint64_t submitted = 0;
  Count done;
  std::exception_ptr failure;  // of a kernel, for whoever waits next
  bool started = false;

  uint64_t push(Kernel kernel) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!started) {
      started = true;
      owner = getpid();
      std::thread([this] { work(); }).detach();
    }
    kernels.push_back(std::move(kernel));
    filled.notify_one();
    return ++submitted;
  }
  void raise_failure() {
    std::exception_ptr found;
    {
      std::lock_guard<std::mutex> lock(mutex);
      std::swap(found, failure);
    }
    if (found) std::rethrow_exception(found);
  }
  uint64_t last() {
    std::lock_guard<std::mutex> lock(mutex);
    return submitted;
  }

 private:
  [[noreturn]] void work() {
    for (uint64_t number = 1;; ++number) {
      Kernel kernel;
      {
        std::unique_lock<std::mutex> lock(mutex);
        filled.wait(lock, [this] { return !kernels.empty(); });
        kernel = std::move(kernels.front());
        kernels.pop_front();
      }
      try {
        kernel();
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        failure = std::current_exception();
      }
      kernel = nullptr;  // lets go of its memory before anybody is told that it is done
      done.set(number);
    }
  }
};

Queue& queue(c10::StreamId id) {
  static auto* found = new Queue[kStreams];  // never destroyed: their threads end with the process
  return found[id];
}

thread_local c10::StreamId current = 0;
std::atomic<c10::StreamId> next{1};

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

struct Event {
  Count done;
  std::atomic<uint64_t> version{0};  // how often it was recorded
  std::chrono::steady_clock::time_point at;
};
using Shared = std::shared_ptr<Event>;  // a queue may hold it longer than whoever made it

Event& event(void* it) { return **static_cast<Shared*>(it); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device wanted) const override {
    TORCH_CHECK(wanted.index() <= 0, "acme: expected device 0, the only one, got ", wanted);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return current_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return new_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return new_stream(); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return visible() ? 1 : 0; }
  bool queryStream(const c10::Stream& stream) const override { return idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all(); }

  void record(void** made, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*made == nullptr) *made = new Shared(std::make_shared<Event>());
    Shared it = *static_cast<Shared*>(*made);
    const auto version = ++it->version;
    enqueue(stream, [it, version] {
      it->at = std::chrono::steady_clock::now();
      it->done.set(version);
    });
  }
  void block(void* made, const c10::Stream& stream) const override {
    if (made == nullptr || faulty("stream-race")) return;
    Shared it = *static_cast<Shared*>(made);
    const auto version = it->version.load();
    enqueue(stream, [it, version] { it->done.wait(version); });
  }
  bool queryEvent(void* made) const override {
    return made == nullptr || event(made).done.reached(event(made).version);
  }
  void synchronizeEvent(void* made) const override {
    if (made != nullptr) event(made).done.wait(event(made).version);
  }
  void destroyEvent(void* made, const c10::DeviceIndex) const noexcept override { delete static_cast<Shared*>(made); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    for (auto* made : {from, to}) {
      TORCH_CHECK(made != nullptr && queryEvent(made), "acme: expected two events that were recorded and are done");
    }
    return std::chrono::duration<double, std::milli>(event(to).at - event(from).at).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

c10::Stream current_stream() { return stream_of(current); }

c10::Stream exchange_stream(c10::Stream stream) {
  const auto before = current_stream();
  current = stream.id();
  return before;
}

c10::Stream new_stream() { return stream_of(1 + (next++ - 1) % (kStreams - 1)); }

void enqueue(c10::Stream stream, Kernel kernel) {
  open();
  check_alive();
  queue(stream.id()).push(std::move(kernel));
}

void synchronize(c10::Stream stream) {
  if (in_bad_fork()) return;  // the parent's work; this process has none
  auto& waited = queue(stream.id());
  waited.done.wait(waited.last());
  waited.raise_failure();
  check_alive();
}

void synchronize_all() {
  for (c10::StreamId id = 0; id < kStreams; ++id) synchronize(stream_of(id));
}

bool idle(c10::Stream stream) { return queue(stream.id()).done.reached(queue(stream.id()).last()); }

bool visible() {
  static const bool found = [] {
    const char* mask = std::getenv("ACME_VISIBLE_DEVICES");
    return mask == nullptr || std::string(mask) == "0";
  }();
  return found;
}

bool in_use() { return owner != 0; }

bool in_bad_fork() { return owner != 0 && owner != getpid(); }

void open() {
  TORCH_CHECK(!in_bad_fork(), "acme: cannot be used in a fork of a process that uses it: start a new process");
}

}  // namespace acme
