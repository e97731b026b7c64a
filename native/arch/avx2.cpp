// The kernels, compiled for avx2 (flags: CMakeLists.txt). Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <immintrin.h>

namespace octavo {
namespace avx2 {
namespace {
#include "../kernels/all.h"
constexpr Kernels table = make("avx2");
}  // namespace
}  // namespace avx2
const Kernels *kernels_avx2() { return &avx2::table; }
}  // namespace octavo
#else
namespace octavo {
const Kernels *kernels_avx2() { return nullptr; }
}  // namespace octavo
#endif
