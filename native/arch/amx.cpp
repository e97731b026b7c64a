// The kernels, compiled for amx (flags: CMakeLists.txt). Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <immintrin.h>
#define OCTAVO_AMX

namespace octavo {
namespace amx {
namespace {
#include "../kernels/vec.h"
#include "../kernels/product.h"
#include "../kernels/tiles.h"
#include "../kernels/rows.h"
#include "../kernels/linear.h"
#include "../kernels/kv.h"
#include "../kernels/rope.h"
#include "../kernels/dot16.h"
#include "../kernels/attention.h"
#include "../kernels/pack.h"
#include "../kernels/sampling.h"
#include "../kernels/checksum.h"
#include "../kernels/probe.h"
#include "../kernels/table.h"
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
