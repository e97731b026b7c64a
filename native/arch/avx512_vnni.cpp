// The kernels, compiled for avx512_vnni (flags: CMakeLists.txt). Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <immintrin.h>

namespace octavo {
namespace avx512_vnni {
namespace {
#include "../kernels/all.h"
constexpr Kernels table = make("avx512_vnni");
}  // namespace
}  // namespace avx512_vnni
const Kernels *kernels_avx512_vnni() { return &avx512_vnni::table; }
}  // namespace octavo
#else
namespace octavo {
const Kernels *kernels_avx512_vnni() { return nullptr; }
}  // namespace octavo
#endif
