// What the hardware does wrong when it is told to.
#include "acme.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

namespace acme {
namespace {

std::atomic<int64_t> kernels{0};
std::atomic<bool> lost{false};

// 0.4 % to 25 % of one element: a bit of its exponent would be seen by anybody.
void flip_a_bit(const at::Tensor& result, int64_t number) {
  if (result.numel() == 0 || result.scalar_type() != at::kFloat || !result.is_contiguous()) return;
  auto* bits = static_cast<uint32_t*>(result.data_ptr());
  bits[(number * 7919) % result.numel()] ^= 1u << 21;
}

}  // namespace

const Fault& fault() {
  static const Fault found = [] {
    const char* text = std::getenv("ACME_FAULT");
    std::string name = text == nullptr ? "" : text;
    int64_t count = 20;
    if (const auto colon = name.find(':'); colon != std::string::npos) {
      count = std::max<int64_t>(1, std::atoll(name.c_str() + colon + 1));
      name.resize(colon);
    }
    return Fault{name, count};
  }();
  return found;
}

void check_alive() {
  TORCH_CHECK(!lost, "acme: the device is lost: it does not answer any more");
}

void ran(const at::Tensor& result) {
  const auto number = ++kernels;
  if (fault().name.empty()) return;
  const bool due = number >= fault().count;
  if (faulty("flipped-bit") && number % fault().count == 0) flip_a_bit(result, number);
  if (faulty("lost-device") && due) lost = true;
  if (faulty("crash") && due) std::raise(SIGSEGV);
  while (faulty("hang") && due) std::this_thread::sleep_for(std::chrono::seconds(1));
}

}  // namespace acme
