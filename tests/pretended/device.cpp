// A CUDA device of one stream on which nothing runs, for builds of PyTorch that know of none: it lets autograd follow
// tensors that say they are on it (see gpu.py). To be loaded before anything asks PyTorch for its CUDA hooks.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {

constexpr auto CUDA = c10::DeviceType::CUDA;

struct PretendedGuard : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  static c10::Device here() { return c10::Device(CUDA, 0); }
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, here()); }
  c10::Device getDevice() const override { return here(); }
  c10::Device exchangeDevice(c10::Device) const override { return here(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<PretendedGuard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

static PretendedGuard guard;
static c10::impl::DeviceGuardImplRegistrar registrar(CUDA, &guard);

struct CUDAHooks : CUDAHooksInterface {  // PyTorch looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
