// The thread pool: the caller is worker 0, the others spin for a while and then sleep.
#pragma once
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "octavo.h"

namespace octavo {

// All threads of a run meet here between two ops.
class Barrier {
public:
    // `crowded`: there are more threads than cores, so waiting awake keeps the others from coming.
    void reset(int n, bool crowded) { count_ = n, arrived_.store(0), crowded_ = crowded; }
    void wait();

private:
    static constexpr int SLEEPERS = 1 << 30;  // beside the number of those that are here: some of them sleep
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    int count_ = 1;
    bool crowded_ = false;
};

class Pool {
public:
    using Job = void (*)(void *arg, int thread);
    Pool(int threads, const Kernels *kernels);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    // Runs job(arg, thread) on all threads, FTZ and DAZ set; returns when all are done. Callers take turns.
    void run(Job job, void *arg);
    // After a fork the threads exist no more: makes new ones, and leaves the old state alone. Call with the GIL held.
    void revive();
    int threads() const { return threads_; }
    const Kernels *kernels() const { return kernels_; }
    Barrier &barrier() { return state_->barrier; }

private:
    struct State {
        std::mutex turn;
        std::vector<std::thread> workers;
        Barrier barrier;
        Job job = nullptr;
        void *arg = nullptr;
        std::atomic<bool> stop{false};
        alignas(64) std::atomic<uint32_t> epoch{0};
        alignas(64) std::atomic<int> sleepers{0};
        alignas(64) std::atomic<uint32_t> pending{0};
        std::atomic<bool> caller_sleeps{false};
    };
    void start();
    static void worker(State *s, int thread);

    const int threads_;
    const Kernels *const kernels_;
    State *state_ = nullptr;
    int pid_ = 0;
};

}  // namespace octavo
