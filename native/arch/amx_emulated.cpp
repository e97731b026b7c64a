// The kernels, compiled for amx with matrix units in software: for tests on any machine. Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <immintrin.h>
#define OCTAVO_AMX
#define OCTAVO_TILES_EMULATED

namespace octavo {
namespace amx_emulated {
namespace {
#include "../kernels/all.h"
constexpr Kernels table = make("amx_emulated");
}  // namespace
}  // namespace amx_emulated
const Kernels *kernels_amx_emulated() { return &amx_emulated::table; }
}  // namespace octavo
#else
namespace octavo {
const Kernels *kernels_amx_emulated() { return nullptr; }
}  // namespace octavo
#endif
