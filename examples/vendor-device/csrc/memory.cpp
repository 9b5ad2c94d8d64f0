// The allocator: poisons fresh and freed memory, and counts it.
#include "acme.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace acme {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

struct Memory {
  std::mutex mutex;
  std::unordered_map<const void*, Block> blocks;  // those that tensors hold, by address
  DeviceStats stats;
};

Memory& memory() {
  static auto* found = new Memory;  // never destroyed: tensors may outlive static objects
  return *found;
}

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

void count(int64_t allocations, int64_t bytes) {
  auto& stats = memory().stats;
  for (auto* one : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes}) {
    bytes > 0 ? (*one)[kAll].increase(bytes) : (*one)[kAll].decrease(-bytes);
  }
  for (auto* one : {&stats.allocation, &stats.active}) {
    allocations > 0 ? (*one)[kAll].increase(1) : (*one)[kAll].decrease(1);
  }
}

Block make_block(size_t bytes) {
  void* address = nullptr;
  TORCH_CHECK(posix_memalign(&address, 64, bytes) == 0, "acme: out of memory: ", bytes, " bytes");
  std::memset(address, kPoison, bytes);
  return {address, [bytes](void* it) {
            std::memset(it, kPoison, bytes);  // whoever still reads it gets NaN
            std::free(it);
          }};
}

// `context` of a DataPtr.
struct Held {
  const void* address;
  size_t bytes;
};

void let_go(void* context) {
  std::unique_ptr<Held> held(static_cast<Held*>(context));
  Block last;  // freed after the lock, unless a kernel holds it
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = memory().blocks.find(held->address);
  last = std::move(found->second);
  memory().blocks.erase(found);
  count(-1, -static_cast<int64_t>(held->bytes));
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    open();
    check_alive();
    if (bytes == 0) return {nullptr, device()};
    auto block = make_block(bytes);
    auto* address = block.get();
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().blocks.emplace(address, std::move(block));
    count(1, static_cast<int64_t>(bytes));
    return {address, new Held{address, bytes}, &let_go, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    synchronize_all();
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // it keeps none
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // kernels hold the blocks that they use
  DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(memory().mutex);
    return memory().stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    each([](auto& one) { one.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex) override {
    each([](auto& one) { one.reset_peak(); });
  }

 private:
  template <typename Change>
  void each(Change change) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto& stats = memory().stats;
    for (auto* one : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes,
                      &stats.allocation, &stats.active}) {
      change((*one)[kAll]);
    }
  }
};

Allocator the_allocator;
REGISTER_ALLOCATOR(kType, &the_allocator)

// The host's memory that the device could reach itself: here all of it, so that only the addresses are remembered.
std::mutex pinned_mutex;
std::unordered_set<const void*>& pinned() {
  static auto* found = new std::unordered_set<const void*>;
  return *found;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 4096, std::max<size_t>(bytes, 1)) == 0, "acme: out of memory: ", bytes,
                " bytes");
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned().insert(address);
    return {address, address, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* address) {
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned().erase(address);
    }
    std::free(address);
  }
};

PinnedAllocator the_pinned_allocator;

}  // namespace

c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return pinned().count(address) > 0;
}

c10::DeviceAllocator* allocator() { return &the_allocator; }

Block block_of(const void* address) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto found = memory().blocks.find(address);
  return found == memory().blocks.end() ? nullptr : found->second;
}

bool is_device_memory(const void* address) { return block_of(address) != nullptr; }

}  // namespace acme
