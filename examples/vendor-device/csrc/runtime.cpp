// What torch asks a device for: hooks and a generator; and the functions of the module `torch.acme`.
#include "acme.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/extension.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace acme {
namespace {

// Numbers are drawn on the host: a generator of the device holds one of the host's.
struct Generator final : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();

  Generator() : GeneratorImpl(acme::device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK_NOT_IMPLEMENTED(false, "acme: its generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK_NOT_IMPLEMENTED(false, "acme: its generators have no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    auto* made = new Generator;
    made->host = host.clone();
    return made;
  }
};

at::Generator new_generator() { return at::make_generator<Generator>(); }

const at::Generator& default_generator() {
  static const auto* found = new at::Generator(new_generator());
  return *found;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return visible(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return visible() ? 1 : 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  at::Device getDeviceFromPtr(void* address) const override {
    return is_device_memory(address) ? device() : at::Device(at::kCPU);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    synchronize_all();
    auto fresh = allocator()->allocate(bytes);
    const auto kept = std::min(bytes, storage.nbytes());
    if (kept > 0) std::memcpy(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

void busy(double milliseconds) {
  enqueue(current_stream(),
          [milliseconds] { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds)); });
}

}  // namespace

at::Generator hosts_generator(const std::optional<at::Generator>& given) {
  const auto& found = given && given->defined() ? *given : default_generator();
  return found.device().type() == kType ? static_cast<Generator*>(found.unsafeGetGeneratorImpl())->host : found;
}

}  // namespace acme

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("visible", &acme::visible);
  m.def("in_use", &acme::in_use);
  m.def("in_bad_fork", &acme::in_bad_fork);
  m.def("synchronize", &acme::synchronize_all, py::call_guard<py::gil_scoped_release>());
  m.def("fallbacks", &acme::fallbacks, py::arg("reset") = false);
  m.def("sleep", &acme::busy, py::arg("milliseconds"));
  m.def("default_generator", [] { return acme::default_generator(); });
  m.def("fault", [] { return acme::fault().name; });
}
