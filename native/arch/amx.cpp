// The kernels, compiled for amx (flags: CMakeLists.txt). Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <immintrin.h>
#define OCTAVO_AMX

namespace octavo {
namespace amx {
namespace {
#include "../kernels/all.h"
constexpr Kernels table = make("amx");
}  // namespace
}  // namespace amx
const Kernels *kernels_amx() { return &amx::table; }
}  // namespace octavo
#else
namespace octavo {
const Kernels *kernels_amx() { return nullptr; }
}  // namespace octavo
#endif
