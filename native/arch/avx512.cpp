// The kernels, compiled for avx512 (flags: CMakeLists.txt). Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <immintrin.h>

namespace octavo {
namespace avx512 {
namespace {
#include "../kernels/vec.h"
#include "../kernels/product.h"
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
