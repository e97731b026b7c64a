#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace octavo {
namespace {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Denormal numbers count as zero while kernels run: that is what the matrix units do, and part of the contract.
class FlushDenormals {
public:
#if defined(__x86_64__)
    FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80 | 0x8040); }  // all exceptions masked, to nearest even, FTZ, DAZ
    ~FlushDenormals() { _mm_setcsr(saved_); }

private:
    unsigned saved_;
#elif defined(__aarch64__)
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" ::"r"(uint64_t(1) << 24));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

private:
    uint64_t saved_;
#endif
};

void futex_wait(std::atomic<uint32_t> *word, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void futex_wake_all(std::atomic<uint32_t> *word) { syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0); }

constexpr auto AWAKE = std::chrono::microseconds(300);  // how long a worker waits for the next run before it sleeps

}  // namespace

void Barrier::wait() {
    if (count_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int i = 0; phase_.load(std::memory_order_acquire) == phase; i++) i < spins_ ? relax() : (void)sched_yield();
}

Pool::Pool(int threads, const Kernels *kernels) : threads_(threads), kernels_(kernels) { start(); }

void Pool::start() {
    State *s = new State;
    cpu_set_t set;
    const bool known = sched_getaffinity(0, sizeof set, &set) == 0;
    s->barrier.reset(threads_, known && threads_ > CPU_COUNT(&set));
    try {
        for (int t = 1; t < threads_; t++) s->workers.emplace_back(worker, s, t);
    } catch (...) {
        s->stop = true;
        s->epoch.fetch_add(1);
        futex_wake_all(&s->epoch);
        for (auto &w : s->workers) w.join();
        delete s;
        throw;
    }
    state_ = s;
    pid_ = (int)getpid();
}

Pool::~Pool() {
    if (pid_ != (int)getpid()) return;  // a forked child: the threads are not ours, and their memory may be in any state
    state_->stop = true;
    state_->epoch.fetch_add(1);
    futex_wake_all(&state_->epoch);
    for (auto &w : state_->workers) w.join();
    delete state_;
}

void Pool::worker(State *s, int thread) {
    uint32_t seen = 0;
    FlushDenormals flush;
    for (;;) {
        auto until = std::chrono::steady_clock::now() + AWAKE;
        for (int i = 0; s->epoch.load(std::memory_order_acquire) == seen; i++) {
            relax();
            if (i % 64 != 63 || std::chrono::steady_clock::now() < until) continue;
            s->sleepers.fetch_add(1);
            while (s->epoch.load() == seen) futex_wait(&s->epoch, seen);
            s->sleepers.fetch_sub(1);
        }
        seen++;
        if (s->stop) return;
        s->job(s->arg, thread);
        s->pending.fetch_sub(1, std::memory_order_acq_rel);
    }
}

void Pool::revive() {
    if (pid_ != (int)getpid()) start();
}

void Pool::run(Job job, void *arg) {
    State *s = state_;
    std::lock_guard<std::mutex> lock(s->turn);
    s->job = job, s->arg = arg;
    s->pending.store(threads_ - 1, std::memory_order_relaxed);
    s->epoch.fetch_add(1);
    if (s->sleepers.load() > 0) futex_wake_all(&s->epoch);
    {
        FlushDenormals flush;
        job(arg, 0);
    }
    for (int i = 0; s->pending.load(std::memory_order_acquire) > 0; i++) i < 4096 ? relax() : (void)sched_yield();
}

}  // namespace octavo
