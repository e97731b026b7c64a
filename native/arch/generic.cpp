// The kernels, compiled for generic (flags: CMakeLists.txt). Everything but the one exported function stays in this file.
#include "octavo.h"
#ifdef OCTAVO_X86
#include <emmintrin.h>
#endif

namespace octavo {
namespace generic {
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
constexpr Kernels table = make("generic");
}  // namespace
}  // namespace generic
const Kernels *kernels_generic() { return &generic::table; }
}  // namespace octavo
