// The kernels, compiled for generic (flags: CMakeLists.txt). Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <immintrin.h>
#endif

namespace octavo {
namespace generic {
namespace {
#include "../kernels/all.h"
constexpr Kernels table = make("generic");
}  // namespace
}  // namespace generic
const Kernels *kernels_generic() { return &generic::table; }
}  // namespace octavo
