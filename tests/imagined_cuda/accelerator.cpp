// A CPU build of torch has no accelerator, and then autograd keeps no streams. This library is loaded before torch's
// own, which find this function instead of theirs. It answers once the device is there (device.cpp).
#include <c10/core/DeviceType.h>
#include <optional>

extern "C" {
bool imagined_cuda_is_there = false;
}

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) {
  return imagined_cuda_is_there ? std::optional(c10::DeviceType::CUDA) : std::nullopt;
}
}  // namespace at::accelerator
