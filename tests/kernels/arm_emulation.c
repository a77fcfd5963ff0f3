// Runs functions of another process's memory: `runner MEMORY FUNCTION NUMBER…`, where MEMORY is a descriptor of that
// process's /proc/…/mem. Each page is fetched when it is first touched, and what has changed is written back at the end.
// Without arguments, it prints the addresses of functions of the C library.
#define _GNU_SOURCE
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MOST_PAGES = 1 << 20, NO_PAGE = 3, NO_ROOM = 4, NOT_WRITTEN = 5 };

struct page {
    uint8_t *at;
    uint8_t *before;
};

struct function {
    const char *name;
    void *at;
};

// functions of the C library that kernels may call
static const struct function functions[] = {
    {"exp", exp}, {"expf", expf}, {"expm1", expm1}, {"expm1f", expm1f}, {"log", log}, {"logf", logf},
    {"log1p", log1p}, {"log1pf", log1pf}, {"tanh", tanh}, {"tanhf", tanhf}, {"pow", pow}, {"powf", powf},
    {"sin", sin}, {"sinf", sinf}, {"cos", cos}, {"cosf", cosf}, {"sqrt", sqrt}, {"sqrtf", sqrtf},
    {"memcpy", memcpy}, {"memmove", memmove}, {"memset", memset}, {"sched_yield", sched_yield},
};

static int memory;
static const int own = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
static size_t num_pages;
static struct page *pages;

static void fetch(int signal, siginfo_t *info, void *context) {
    uint8_t *at = (uint8_t *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));
    int all = PROT_READ | PROT_WRITE | PROT_EXEC;
    uint8_t *before = mmap(0, PAGE, PROT_READ | PROT_WRITE, own, -1, 0);
    if (pread(memory, before, PAGE, (off_t)at) != PAGE) _exit(NO_PAGE);
    if (num_pages == MOST_PAGES || mmap(at, PAGE, all, own | MAP_FIXED, -1, 0) != at) _exit(NO_ROOM);
    memcpy(at, before, PAGE);
    pages[num_pages++] = (struct page){at, before};
}

int main(int count, char **words) {
    uint64_t numbers[16] = {0};
    for (int i = 1; i < count; i++) numbers[i - 1] = strtoull(words[i], 0, 10);
    if (count == 1) {
        for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
            printf("%s=%llu\n", functions[i].name, (unsigned long long)(uintptr_t)functions[i].at);
        return 0;
    }
    memory = (int)numbers[0];
    pages = mmap(0, MOST_PAGES * sizeof *pages, PROT_READ | PROT_WRITE, own, -1, 0);
    struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    void (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) = (void *)numbers[1];
    function(numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]);
    for (size_t i = 0; i < num_pages; i++)
        for (size_t byte = 0; byte < PAGE; byte += 64)
            if (memcmp(pages[i].at + byte, pages[i].before + byte, 64) &&
                pwrite(memory, pages[i].at + byte, 64, (off_t)(pages[i].at + byte)) != 64)
                _exit(NOT_WRITTEN);
    return 0;
}
