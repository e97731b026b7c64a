// The kernels, compiled for avx512 (flags: CMakeLists.txt). Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <immintrin.h>

namespace octavo {
namespace avx512 {
namespace {
#include "../kernels/all.h"
constexpr Kernels table = make("avx512");
}  // namespace
}  // namespace avx512
const Kernels *kernels_avx512() { return &avx512::table; }
}  // namespace octavo
#else
namespace octavo {
const Kernels *kernels_avx512() { return nullptr; }
}  // namespace octavo
#endif
