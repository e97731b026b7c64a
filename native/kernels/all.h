// All kernels of one instruction set, in the order in which they build on each other. Included by the arch files inside their own namespace.
#pragma once

#include "vec.h"
#include "product.h"
#ifdef OCTAVO_AMX
#include "tiles.h"
#endif
#include "rows.h"
#include "linear.h"
#include "kv.h"
#include "kv_store.h"
#include "rope.h"
#include "dot16.h"
#include "softmax.h"
#include "query_tile.h"
#ifdef OCTAVO_AMX
#include "tiles_attention.h"
#endif
#include "attention.h"
#include "quant.h"
#ifdef OCTAVO_AMX
#include "tiles_quant.h"
#endif
#include "linear_quant.h"
#include "pack.h"
#include "pack_quant.h"
#include "sampling.h"
#include "checksum.h"
#include "probe.h"
#include "table.h"
