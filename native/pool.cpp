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
    FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(FLOAT_MODE); }
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

using Clock = std::chrono::steady_clock;
constexpr auto AWAKE = std::chrono::microseconds(300);   // how long a worker waits for the next run before it sleeps
constexpr auto PATIENCE = std::chrono::microseconds(50);  // how long a thread waits for the others of its run before it sleeps

// Spins until `done` or for so long. Returns whether it is done.
template <class Done>
bool spin(Done done, Clock::duration longest) {
    for (int i = 0; i < 64; i++) {
        if (done()) return true;
        relax();
    }
    for (const auto until = Clock::now() + longest; Clock::now() < until;)
        for (int i = 0; i < 32; i++) {
            if (done()) return true;
            relax();
        }
    return done();
}

}  // namespace

// Whoever waits for a thread that was sent off its core must not spin for long: its turns go with nothing done, and when the other is back
// it is off itself. Asleep it keeps its claim, and is put on a core when it is woken.
void Barrier::wait() {
    if (count_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    const int before = arrived_.fetch_add(1, std::memory_order_acq_rel);
    if ((before & ~SLEEPERS) + 1 == count_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        if (before & SLEEPERS) futex_wake_all(&phase_);
        return;
    }
    const auto over = [&] { return phase_.load(std::memory_order_acquire) != phase; };
    if (!crowded_ && spin(over, PATIENCE)) return;
    // Marked where the last one counts itself in, so that it sees the mark or we see it. Nobody is missing: then it is about to end the
    // phase, and wakes nobody. Some are: they are of this phase and find the mark, or it is over already, and the futex does not wait.
    const int here = arrived_.fetch_or(SLEEPERS, std::memory_order_acq_rel) & ~SLEEPERS;
    if (here == count_ || here == 0)
        while (!over()) sched_yield();
    else
        while (!over()) futex_wait(&phase_, phase);
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
        if (!spin([&] { return s->epoch.load(std::memory_order_acquire) != seen; }, AWAKE)) {
            s->sleepers.fetch_add(1);
            while (s->epoch.load() == seen) futex_wait(&s->epoch, seen);
            s->sleepers.fetch_sub(1);
        }
        seen++;
        if (s->stop) return;
        s->job(s->arg, thread);
        if (s->pending.fetch_sub(1) == 1 && s->caller_sleeps.load()) futex_wake_all(&s->pending);
    }
}

void Pool::revive() {
    if (pid_ != (int)getpid()) start();
}

void Pool::run(Job job, void *arg) {
    State *s = state_;
    std::lock_guard<std::mutex> lock(s->turn);
    s->job = job, s->arg = arg;
    s->pending.store((uint32_t)threads_ - 1, std::memory_order_relaxed);
    s->epoch.fetch_add(1);
    if (s->sleepers.load() > 0) futex_wake_all(&s->epoch);
    {
        FlushDenormals flush;
        job(arg, 0);
    }
    if (spin([&] { return s->pending.load(std::memory_order_acquire) == 0; }, PATIENCE)) return;
    s->caller_sleeps = true;
    while (const uint32_t left = s->pending.load()) futex_wait(&s->pending, left);
    s->caller_sleeps = false;
}

}  // namespace octavo
