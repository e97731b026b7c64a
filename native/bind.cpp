// octavo._native: the only file that knows Python. Limited API (3.11), so one binary serves every later version.
// Addresses cross as integers: ops/native.py owns the buffers and keeps them alive; nothing else imports this module.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "program.h"

using namespace octavo;

namespace {


PyObject *raise_cpp() {
    try {
        throw;
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    } catch (const std::invalid_argument &e) {
        PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const std::exception &e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    return nullptr;
}

// ---- Memory: anonymous pages, committed when first touched, readable and writable as a buffer -----------------------

struct MemoryObject {
    PyObject_HEAD
    char *data;
    size_t bytes;
};

PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *) {
    Py_ssize_t bytes;
    int huge = 0;
    if (!PyArg_ParseTuple(args, "n|p", &bytes, &huge)) return nullptr;
    if (bytes <= 0) {
        PyErr_Format(PyExc_ValueError, "a memory of %zd bytes", bytes);
        return nullptr;
    }
    constexpr size_t HUGE = size_t(2) << 20;
    const size_t size = ((size_t)bytes + HUGE - 1) / HUGE * HUGE, map = size + HUGE;
    void *p = mmap(nullptr, map, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return PyErr_NoMemory();
    char *begin = (char *)p, *data = (char *)(((uintptr_t)p + HUGE - 1) / HUGE * HUGE);
    if (data > begin) munmap(begin, (size_t)(data - begin));
    munmap(data + size, (size_t)(begin + map - data - size));
    if (huge) madvise(data, size, MADV_HUGEPAGE);
    auto *self = (MemoryObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) {
        munmap(data, size);
        return nullptr;
    }
    self->data = data, self->bytes = (size_t)bytes;
    return (PyObject *)self;
}
void memory_dealloc(PyObject *o) {
    auto *self = (MemoryObject *)o;
    constexpr size_t HUGE = size_t(2) << 20;
    if (self->data) munmap(self->data, (self->bytes + HUGE - 1) / HUGE * HUGE);
    PyTypeObject *type = Py_TYPE(o);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(o);
    Py_DECREF(type);
}
int memory_buffer(PyObject *o, Py_buffer *view, int flags) {
    auto *self = (MemoryObject *)o;
    return PyBuffer_FillInfo(view, o, self->data, (Py_ssize_t)self->bytes, 0, flags);
}
PyObject *memory_address(PyObject *o, void *) { return PyLong_FromVoidPtr(((MemoryObject *)o)->data); }
PyObject *memory_bytes(PyObject *o, void *) { return PyLong_FromSize_t(((MemoryObject *)o)->bytes); }
// commit(offset, nbytes) → whether the system did: gives out the pages now, whatever they hold and whoever writes there meanwhile.
PyObject *memory_commit(PyObject *o, PyObject *args) {
    auto *self = (MemoryObject *)o;
    Py_ssize_t offset, bytes;
    if (!PyArg_ParseTuple(args, "nn", &offset, &bytes)) return nullptr;
    if (offset < 0 || bytes < 0 || offset % 4096 || (size_t)offset > self->bytes || (size_t)bytes > self->bytes - (size_t)offset) {
        PyErr_Format(PyExc_ValueError, "%zd bytes from byte %zd of a memory of %zu, from a page on", bytes, offset, self->bytes);
        return nullptr;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    constexpr int POPULATE_WRITE = 23;  // of Linux 5.14; older headers have no name for it
    failed = madvise(self->data + offset, (size_t)bytes, POPULATE_WRITE);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!failed);
}
PyMethodDef memory_methods[] = {{"commit", memory_commit, METH_VARARGS, "commit(offset, nbytes): give out these pages now; whether the system can."},
                                {nullptr, nullptr, 0, nullptr}};
PyGetSetDef memory_fields[] = {{"address", memory_address, nullptr, "Address of the first byte (2 MiB aligned).", nullptr},
                               {"nbytes", memory_bytes, nullptr, "Size in bytes.", nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot memory_slots[] = {{Py_tp_new, (void *)memory_new},
                              {Py_tp_dealloc, (void *)memory_dealloc},
                              {Py_tp_getset, memory_fields},
                              {Py_tp_methods, memory_methods},
                              {Py_bf_getbuffer, (void *)memory_buffer},
                              {Py_tp_doc, (void *)"Memory(nbytes, huge=False): anonymous pages, committed when first touched."},
                              {0, nullptr}};
PyType_Spec memory_spec = {"octavo._native.Memory", sizeof(MemoryObject), 0, Py_TPFLAGS_DEFAULT, memory_slots};

// ---- Pool -----------------------------------------------------------------------------------------------------------

struct PoolObject {
    PyObject_HEAD
    Pool *pool;
};

PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *) {
    int threads;
    const char *variant = nullptr;
    if (!PyArg_ParseTuple(args, "i|z", &threads, &variant)) return nullptr;
    if (threads < 1 || threads > 1024) {
        PyErr_Format(PyExc_ValueError, "threads must be between 1 and 1024, not %d", threads);
        return nullptr;
    }
    const Kernels *kernels = variant ? find_kernels(variant) : best_kernels();
    if (!kernels) {
        PyErr_Format(PyExc_ValueError, "the instruction set %s is not available here; there are %s", variant, available_variants().c_str());
        return nullptr;
    }
    auto *self = (PoolObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return nullptr;
    try {
        self->pool = new Pool(threads, kernels);
    } catch (...) {
        Py_DECREF(self);
        return raise_cpp();
    }
    return (PyObject *)self;
}
void pool_dealloc(PyObject *o) {
    delete ((PoolObject *)o)->pool;
    PyTypeObject *type = Py_TYPE(o);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(o);
    Py_DECREF(type);
}
PyObject *pool_threads(PyObject *o, void *) { return PyLong_FromLong(((PoolObject *)o)->pool->threads()); }
PyObject *pool_variant(PyObject *o, void *) { return PyUnicode_FromString(((PoolObject *)o)->pool->kernels()->name); }
PyGetSetDef pool_fields[] = {{"threads", pool_threads, nullptr, "Threads, the caller included.", nullptr},
                             {"variant", pool_variant, nullptr, "The instruction-set variant.", nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};

struct Packing {
    Pool *pool;
    char *dst;
    std::vector<Source> parts;
    int64_t k, kp, panels;
    int32_t layout;
    bool interleave, f32;
    std::atomic<bool> fits{true};
};

void pack_share(void *arg, int thread) {
    Packing &w = *(Packing *)arg;
    const int64_t threads = w.pool->threads(), bytes = w.layout ? panel_bytes(LAYOUTS[w.layout], w.kp) : w.kp * 16 * (w.f32 ? 4 : 2);
    for (int64_t p = w.panels * thread / threads; p < w.panels * (thread + 1) / threads; p++) {
        const void *rows[16] = {};
        int32_t kinds[16] = {};
        for (int64_t i = 0; i < 16; i++) {
            size_t part = w.interleave ? (size_t)(p % 2) : 0;
            int64_t row = w.interleave ? p / 2 * 16 + i : p * 16 + i;
            while (!w.interleave && part < w.parts.size() && row >= w.parts[part].rows) row -= w.parts[part++].rows;
            if (part >= w.parts.size() || row >= w.parts[part].rows) continue;
            kinds[i] = w.parts[part].kind;
            rows[i] = (const char *)w.parts[part].data + row * w.parts[part].row_bytes;
        }
        char *dst = w.dst + p * bytes;
        if (!w.layout)
            w.pool->kernels()->pack_panel(dst, rows, kinds, w.k, w.kp, w.f32);
        else if (!w.pool->kernels()->pack_quant(dst, w.layout, rows, kinds, w.k, w.kp))
            w.fits = false;
    }
}

// pack(dst, layout, panels, k, kp, f32, interleave, parts) → whether the numbers fit the layout. parts is a tuple of
// (address, rows, bytes of a row, kind): kind as in Source.
PyObject *pool_pack(PyObject *o, PyObject *args) {
    unsigned long long dst;
    long long panels, k, kp;
    int layout, f32, interleave;
    PyObject *parts;
    if (!PyArg_ParseTuple(args, "KiLLLppO!", &dst, &layout, &panels, &k, &kp, &f32, &interleave, &PyTuple_Type, &parts)) return nullptr;
    if (layout < 0 || layout >= LAYOUT_COUNT) {
        PyErr_Format(PyExc_ValueError, "no layout %d", layout);
        return nullptr;
    }
    if (layout != LAYOUT_ACT && LAYOUTS[layout].step == ALL_K && kp > MAX_K) {
        PyErr_Format(PyExc_ValueError, "%s takes matrices of up to %lld inputs, not %lld", LAYOUTS[layout].name, (long long)MAX_K, k);
        return nullptr;
    }
    Packing w{((PoolObject *)o)->pool, (char *)dst, {}, k, kp, panels, layout, interleave != 0, f32 != 0};
    for (Py_ssize_t i = 0; i < PyTuple_Size(parts); i++) {
        unsigned long long address;
        long long rows, row_bytes;
        int kind;
        if (!PyArg_ParseTuple(PyTuple_GetItem(parts, i), "KLLi", &address, &rows, &row_bytes, &kind)) return nullptr;
        if (kind == 2 && (LAYOUTS[layout].block == 0 || k % LAYOUTS[layout].block)) {
            PyErr_Format(PyExc_ValueError, "rows of %lld are no blocks of %s", k, LAYOUTS[layout].name);
            return nullptr;
        }
        w.parts.push_back({(const void *)address, rows, row_bytes, kind});
    }
    if (interleave && w.parts.size() != 2) {
        PyErr_SetString(PyExc_ValueError, "interleaving takes two parts");
        return nullptr;
    }
    try {
        w.pool->revive();
    } catch (...) {
        return raise_cpp();
    }
    PyThreadState *state = PyEval_SaveThread();
    w.pool->run(pack_share, &w);
    PyEval_RestoreThread(state);
    return PyBool_FromLong(w.fits);
}

struct Vector {
    const Kernels *kernels;
    float *dst;
    const float *src;
    int64_t n;
    bool rounded;
};
// exp(dst, src, n, rounded): an exponential over n float32 (a multiple of 16), by address; for tests.
PyObject *pool_exp(PyObject *o, PyObject *args) {
    unsigned long long dst, src;
    long long n;
    int rounded;
    if (!PyArg_ParseTuple(args, "KKLp", &dst, &src, &n, &rounded)) return nullptr;
    Vector v{((PoolObject *)o)->pool->kernels(), (float *)dst, (const float *)src, n, rounded != 0};
    try {
        ((PoolObject *)o)->pool->revive();
    } catch (...) {
        return raise_cpp();
    }
    ((PoolObject *)o)->pool->run(
        [](void *arg, int thread) {
            const Vector &w = *(const Vector *)arg;
            if (thread == 0) w.kernels->exp_test(w.dst, w.src, w.n, w.rounded);
        },
        &v);
    Py_RETURN_NONE;
}

// What measurements are compared with (kernels/probe.h), on all threads at once.
struct Probe {
    Pool *pool;
    const char *data;  // to read; null: products in registers
    int bits;          // of whole numbers of so many bits; 0: of float32 or bfloat16
    int64_t amount;    // bytes, or rounds
    std::atomic<int64_t> operations{0};
    std::atomic<uint64_t> sink{0};
};
void probe_share(void *arg, int thread) {
    Probe &p = *(Probe *)arg;
    const Kernels *k = p.pool->kernels();
    k->enter();
    if (p.data) {
        const int64_t each = p.amount / p.pool->threads() / 64 * 64;
        p.sink ^= k->probe_read(p.data + each * thread, each);
        p.operations += each;
    } else {
        float registers[16] = {1};
        p.operations += p.bits ? k->probe_codes(p.amount, registers, p.bits) : k->probe_products(p.amount, registers);
    }
    k->leave();
}
// probe(address, bytes): reads memory; probe(0, rounds, bits=0): products in registers, of quantized weights of so many bits, or (0) of numbers. Returns (bytes or operations, seconds).
PyObject *pool_probe(PyObject *o, PyObject *args) {
    unsigned long long address;
    long long amount;
    int bits = 0;
    if (!PyArg_ParseTuple(args, "KL|i", &address, &amount, &bits)) return nullptr;
    if (amount < 0) {
        PyErr_SetString(PyExc_ValueError, "probe: the amount is negative");
        return nullptr;
    }
    Probe probe;
    probe.pool = ((PoolObject *)o)->pool, probe.data = (const char *)address, probe.bits = bits, probe.amount = amount;
    try {
        probe.pool->revive();
    } catch (...) {
        return raise_cpp();
    }
    PyThreadState *state = PyEval_SaveThread();
    const auto began = std::chrono::steady_clock::now();
    probe.pool->run(probe_share, &probe);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    PyEval_RestoreThread(state);
    return Py_BuildValue("Ld", (long long)probe.operations.load(), seconds.count());
}

// checksum(data): of a buffer, a mebibyte at a time on all threads, the results summed up in order.
struct Checksum {
    static constexpr int64_t CHUNK = 1 << 20;
    Pool *pool;
    const char *data;
    int64_t bytes;
    std::vector<uint64_t> found;
};
void checksum_share(void *arg, int thread) {
    Checksum &c = *(Checksum *)arg;
    const int64_t chunks = (int64_t)c.found.size(), threads = c.pool->threads();
    for (int64_t i = chunks * thread / threads; i < chunks * (thread + 1) / threads; i++) {
        const int64_t begin = i * Checksum::CHUNK, left = c.bytes - begin;
        c.found[(size_t)i] = c.pool->kernels()->checksum(c.data + begin, left < Checksum::CHUNK ? left : Checksum::CHUNK);
    }
}
PyObject *pool_checksum(PyObject *o, PyObject *args) {
    unsigned long long address;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KL", &address, &bytes)) return nullptr;
    if (bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "checksum: the number of bytes is negative");
        return nullptr;
    }
    Checksum c{((PoolObject *)o)->pool, (const char *)address, bytes, {}};
    try {
        c.found.resize((size_t)(bytes / Checksum::CHUNK + (bytes % Checksum::CHUNK != 0)));
        c.pool->revive();
    } catch (...) {
        return raise_cpp();
    }
    PyThreadState *state = PyEval_SaveThread();
    c.pool->run(checksum_share, &c);
    PyEval_RestoreThread(state);
    uint64_t sum = (uint64_t)bytes;
    for (uint64_t each : c.found) sum = (sum ^ each) * 0x9e3779b97f4a7c15u;
    return PyLong_FromUnsignedLongLong(sum);
}
PyMethodDef pool_methods[] = {{"pack", pool_pack, METH_VARARGS, "pack(dst, layout, panels, k, kp, f32, interleave, parts): weights into panels."},
                              {"exp", pool_exp, METH_VARARGS, "exp(dst, src, n, rounded): the exponential of the kernels, or softmax's for bfloat16, for tests."},
                              {"checksum", pool_checksum, METH_VARARGS, "checksum(address, bytes): finds damage, at memory speed."},
                              {"probe", pool_probe, METH_VARARGS, "probe(address, bytes) or probe(0, rounds, codes): (bytes or operations, seconds)."},
                              {nullptr, nullptr, 0, nullptr}};
PyType_Slot pool_slots[] = {{Py_tp_new, (void *)pool_new},
                            {Py_tp_dealloc, (void *)pool_dealloc},
                            {Py_tp_getset, pool_fields},
                            {Py_tp_methods, pool_methods},
                            {Py_tp_doc, (void *)"Pool(threads, variant=None): the threads that run programs, and their kernels."},
                            {0, nullptr}};
PyType_Spec pool_spec = {"octavo._native.Pool", sizeof(PoolObject), 0, Py_TPFLAGS_DEFAULT, pool_slots};

// ---- Program --------------------------------------------------------------------------------------------------------

struct ProgramObject {
    PyObject_HEAD
    Program *program;
    PoolObject *pool;
    PyObject *keep;  // whatever owns the memory behind the addresses
    bool busy;
};

template <class T> bool read_array(const char *data, Py_ssize_t bytes, size_t count, const char *what, std::vector<T> *out) {
    if (bytes % (Py_ssize_t)sizeof(T) != 0 || (count && (size_t)bytes != count * sizeof(T))) {
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes", what, bytes);
        return false;
    }
    out->resize((size_t)bytes / sizeof(T));
    if (bytes) memcpy(out->data(), data, (size_t)bytes);
    return true;
}

// Program(pool, bounds, step, slots, forward, sample, keep): packed bytes, as ops/native.py makes them.
PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *) {
    PyObject *pool, *keep;
    const char *data[5];
    Py_ssize_t bytes[5];
    if (!PyArg_ParseTuple(args, "Oy#y#y#y#y#O", &pool, data, bytes, data + 1, bytes + 1, data + 2, bytes + 2, data + 3, bytes + 3, data + 4, bytes + 4,
                          &keep))
        return nullptr;
    PyObject *module = PyImport_ImportModule("octavo._native");
    PyObject *pool_type = module ? PyObject_GetAttrString(module, "Pool") : nullptr;
    const int is_pool = pool_type ? PyObject_IsInstance(pool, pool_type) : -1;
    Py_XDECREF(pool_type);
    Py_XDECREF(module);
    if (is_pool < 0) return nullptr;
    if (!is_pool) {
        PyErr_SetString(PyExc_TypeError, "the first argument must be a Pool");
        return nullptr;
    }
    std::vector<Bounds> bounds;
    std::vector<uint64_t> step, slots;
    std::vector<Op> forward, sample;
    if (!read_array(data[0], bytes[0], 1, "bounds", &bounds) || !read_array(data[1], bytes[1], 17, "step", &step) ||
        !read_array(data[2], bytes[2], 14, "slots", &slots) || !read_array(data[3], bytes[3], 0, "forward", &forward) ||
        !read_array(data[4], bytes[4], 0, "sample", &sample))
        return nullptr;
    auto *self = (ProgramObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return nullptr;
    try {
        self->program = new Program(((PoolObject *)pool)->pool, bounds[0], step.data(), slots.data(), std::move(forward), std::move(sample));
    } catch (...) {
        Py_DECREF(self);
        return raise_cpp();
    }
    Py_INCREF(pool);
    Py_INCREF(keep);
    self->pool = (PoolObject *)pool, self->keep = keep;
    return (PyObject *)self;
}
void program_dealloc(PyObject *o) {
    auto *self = (ProgramObject *)o;
    delete self->program;
    Py_XDECREF((PyObject *)self->pool);
    Py_XDECREF(self->keep);
    PyTypeObject *type = Py_TYPE(o);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(o);
    Py_DECREF(type);
}
PyObject *program_run(PyObject *o, PyObject *const *args, Py_ssize_t n) {
    auto *self = (ProgramObject *)o;
    const long segments = n == 1 ? PyLong_AsLong(args[0]) : -1;
    if (segments == -1 && PyErr_Occurred()) return nullptr;
    if (segments < Program::FORWARD || segments > (Program::FORWARD | Program::SAMPLE)) {
        PyErr_SetString(PyExc_ValueError, "run(segments): 1 is forward, 2 is sample, 3 is both");
        return nullptr;
    }
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the program is running already");
        return nullptr;
    }
    try {
        self->pool->pool->revive();
        self->busy = true;
        PyThreadState *state = PyEval_SaveThread();
        std::string wrong;
        std::exception_ptr thrown;  // while no memory is left for a step's plan
        try {
            wrong = self->program->run((int)segments);
        } catch (...) {
            thrown = std::current_exception();
        }
        PyEval_RestoreThread(state);
        self->busy = false;
        if (thrown) std::rethrow_exception(thrown);
        if (!wrong.empty()) {
            PyErr_SetString(PyExc_ValueError, wrong.c_str());
            return nullptr;
        }
    } catch (...) {
        return raise_cpp();
    }
    Py_RETURN_NONE;
}
PyObject *program_scratch(PyObject *o, void *) { return PyLong_FromSize_t(((ProgramObject *)o)->program->scratch_bytes()); }
PyObject *program_busy(PyObject *o, void *) { return PyLong_FromLongLong(((ProgramObject *)o)->program->busy_ns()); }
PyObject *program_shared(PyObject *o, void *) { return PyLong_FromLongLong(((ProgramObject *)o)->program->tokens_shared()); }
PyObject *program_profile(PyObject *o, PyObject *args) {
    auto *self = (ProgramObject *)o;
    int on;
    if (!PyArg_ParseTuple(args, "p", &on)) return nullptr;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the program is running");
        return nullptr;
    }
    const std::vector<int64_t> times = self->program->profile(on != 0);
    PyObject *list = PyList_New((Py_ssize_t)times.size());
    for (size_t i = 0; list && i < times.size(); i++) {
        PyObject *each = PyLong_FromLongLong(times[i]);
        if (!each || PyList_SetItem(list, (Py_ssize_t)i, each) < 0) Py_CLEAR(list);
    }
    return list;
}
PyGetSetDef program_fields[] = {{"scratch_bytes", program_scratch, nullptr, "Scratch of all threads.", nullptr},
                                {"busy_ns", program_busy, nullptr, "Nanoseconds spent in run() so far.", nullptr},
                                {"tokens_shared", program_shared, nullptr,
                                 "Tokens of context that sequences read together with others instead of for themselves, in all steps so far.", nullptr},
                                {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef program_methods[] = {{"run", (PyCFunction)(void (*)(void))program_run, METH_FASTCALL, "run(segments): 1 forward, 2 sample, 3 both; without the GIL."},
                                 {"profile", program_profile, METH_VARARGS, "profile(on): nanoseconds of every op since the last call; whether to go on."},
                                 {nullptr, nullptr, 0, nullptr}};
PyType_Slot program_slots[] = {{Py_tp_new, (void *)program_new},
                               {Py_tp_dealloc, (void *)program_dealloc},
                               {Py_tp_methods, program_methods},
                               {Py_tp_getset, program_fields},
                               {Py_tp_doc, (void *)"Program(pool, bounds, step, slots, forward, sample, keep): a recorded model."},
                               {0, nullptr}};
PyType_Spec program_spec = {"octavo._native.Program", sizeof(ProgramObject), 0, Py_TPFLAGS_DEFAULT, program_slots};

// ---- Module ---------------------------------------------------------------------------------------------------------

PyObject *info(PyObject *, PyObject *) {
    return Py_BuildValue("{s:s,s:s,s:s}", "variant", best_kernels()->name, "available", available_variants().c_str(), "compiler", OCTAVO_COMPILER);
}
// layout_bytes(layout, kp): bytes of a panel, bytes of a row of quantized activations.
PyObject *layout_bytes(PyObject *, PyObject *args) {
    int layout;
    long long kp;
    if (!PyArg_ParseTuple(args, "iL", &layout, &kp)) return nullptr;
    if (layout <= LAYOUT_ACT || layout >= LAYOUT_COUNT) {
        PyErr_Format(PyExc_ValueError, "no quantized layout %d", layout);
        return nullptr;
    }
    return Py_BuildValue("LL", (long long)panel_bytes(LAYOUTS[layout], kp), (long long)act_row_bytes(LAYOUTS[layout], kp));
}
PyObject *layouts(PyObject *, PyObject *) {
    PyObject *names = PyTuple_New(LAYOUT_COUNT);
    for (int i = 0; names && i < LAYOUT_COUNT; i++) {
        const LayoutInfo &l = LAYOUTS[i];
        PyObject *one = Py_BuildValue("siiiii", l.name, l.bits, l.zero, l.step, l.group, l.block);
        if (!one || PyTuple_SetItem(names, i, one) < 0) {
            Py_DECREF(names);
            return nullptr;
        }
    }
    return names;
}
PyMethodDef module_methods[] = {{"info", info, METH_NOARGS, "info(): the best variant, the available ones (from the plainest on), the compiler."},
                                {"layouts", layouts, METH_NOARGS, "layouts(): (name, bits, zero, step, group, block) of each weight layout, by its number."},
                                {"layout_bytes", layout_bytes, METH_VARARGS, "layout_bytes(layout, kp): bytes of a panel, and of a row of quantized activations."},
                                {nullptr, nullptr, 0, nullptr}};

int module_exec(PyObject *module) {
    ask_for_matrix_units();
    const std::pair<const char *, PyType_Spec *> types[] = {{"Memory", &memory_spec}, {"Pool", &pool_spec}, {"Program", &program_spec}};
    for (auto [name, spec] : types) {
        PyObject *type = PyType_FromSpec(spec);
        if (!type || PyModule_AddObjectRef(module, name, type) < 0) {
            Py_XDECREF(type);
            return -1;
        }
        Py_DECREF(type);
    }
    return 0;
}
PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)module_exec}, {0, nullptr}};
PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "octavo._native", "Octavo's kernels, thread pool and program replay.", 0, module_methods, module_slots,
                          nullptr,               nullptr,          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_def); }
