// Which instruction-set variant runs. Compiled without arch flags; nothing here may touch a vector register early.
#include "program.h"

#include <cstring>

#ifdef OCTAVO_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

constexpr const char *VARIANTS[] = {"generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"};

struct Features {
    bool avx2 = false, avx512 = false, vnni = false, bf16 = false, amx = false;
};

#ifdef OCTAVO_X86
uint64_t xcr0() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}
bool matrix_permission() {  // the kernel hands out the 8 KiB of tile state only on request; threads inherit it
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
Features detect() {
    Features f;
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return f;
    const uint64_t state = xcr0();
    const bool fma = c & bit_FMA, f16c = c & bit_F16C;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
    f.avx2 = (state & 0x6) == 0x6 && (b & bit_AVX2) && fma && f16c;
    const uint32_t need = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ | bit_AVX512CD;
    f.avx512 = f.avx2 && (state & 0xe6) == 0xe6 && (b & need) == need;
    f.vnni = f.avx512 && (c & bit_AVX512VNNI);
    uint32_t more = 0, unused;
    if (a >= 1) __get_cpuid_count(7, 1, &more, &unused, &unused, &unused);
    f.bf16 = f.vnni && (more & 1u << 5);
    const uint32_t need_amx = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
    f.amx = f.vnni && (state & 0x60000) == 0x60000 && (d & need_amx) == need_amx && matrix_permission();
    return f;
}
#else
Features detect() { return {}; }
#endif

const Features &features() {
    static const Features f = detect();
    return f;
}

}  // namespace

void ask_for_matrix_units() { features(); }

const Kernels *find_kernels(const char *name) {
    const Features &f = features();
    if (!strcmp(name, "generic")) return kernels_generic();
    if (!strcmp(name, "avx2") && f.avx2) return kernels_avx2();
    if (!strcmp(name, "avx512") && f.avx512) return kernels_avx512();
    if (!strcmp(name, "avx512_vnni") && f.vnni) return kernels_avx512_vnni();
    if (!strcmp(name, "avx512_bf16") && f.bf16) return kernels_avx512_bf16();
    if (!strcmp(name, "amx") && f.amx) return kernels_amx();
    if (!strcmp(name, "amx_emulated")) return kernels_amx_emulated();
    return nullptr;
}

std::string available_variants() {
    std::string names;
    for (const char *name : VARIANTS)
        if (find_kernels(name)) names += std::string(names.empty() ? "" : ",") + name;
    return names;
}

const Kernels *best_kernels() {
    const Kernels *best = nullptr;
    for (const char *name : VARIANTS)
        if (const Kernels *k = find_kernels(name))  // null where it cannot run: nothing of such a one may be asked
            if (strcmp(name, "avx512_bf16") || pairs_pay()) best = k;
    return best;
}

}  // namespace octavo
