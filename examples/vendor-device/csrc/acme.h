// Acme NPU: a PrivateUse1 device that simulates a chip on the host. Memory, queues and faults, without any Python.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace acme {

constexpr auto kType = c10::DeviceType::PrivateUse1;
inline c10::Device device() { return {kType, 0}; }

// Memory. A block lives as long as a tensor or a queued kernel holds it.
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating-point type, -1 in integers
using Block = std::shared_ptr<void>;
c10::DeviceAllocator* allocator();
Block block_of(const void* address);
bool is_device_memory(const void* address);
c10::Allocator* pinned_allocator();  // of memory of the host that the device may read and write itself
bool is_pinned(const void* address);

// Queues. A stream is a queue with a thread of its own; a kernel is a function that the thread calls.
using Kernel = std::function<void()>;
c10::Stream current_stream();
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream();
void enqueue(c10::Stream stream, Kernel kernel);
void synchronize(c10::Stream stream);
void synchronize_all();
bool idle(c10::Stream stream);
bool in_use();       // whether a queue has a thread
bool in_bad_fork();  // whether the threads are those of a parent process
void open();         // raises where they are

// Faults of the hardware, which ACME_FAULT=NAME or NAME:COUNT plants; COUNT says from which kernel on, or how often.
struct Fault {
  std::string name;
  int64_t count;
};
const Fault& fault();
// Whether ACME_VISIBLE_DEVICES, where it is set, names the one chip: 0.
bool visible();
inline bool faulty(const char* name) { return fault().name == name; }
void check_alive();                  // raises where the device is lost
void ran(const at::Tensor& result);  // a kernel wrote this: counts it, and does what the fault says

// Kernels. The host's tensor over the same memory; only a queue, or somebody who has waited for it, may touch it.
at::Tensor on_host(const at::Tensor& tensor);
int64_t fallbacks(bool reset);
at::Generator hosts_generator(const std::optional<at::Generator>& given);  // that draws the numbers of the device's

}  // namespace acme
