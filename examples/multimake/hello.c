/* What a compiler makes of one loop. At -O2, clang and gcc since version 12 use vector instructions for it;
   older gcc, pcc and tcc do not. */
#include <stdio.h>
#include <time.h>

#define COUNT 4096
#define ROUNDS 4000
#define BATCHES 5

#if defined __clang__
#define COMPILER "clang"
#elif defined __TINYC__
#define COMPILER "tcc"
#elif defined __PCC__
#define COMPILER "pcc"
#elif defined __GNUC__
#define COMPILER "gcc"
#else
#define COMPILER "a compiler"
#endif

static unsigned numbers[COUNT];

static unsigned sum(void)
{
    unsigned total = 0;
    for (int i = 0; i < COUNT; i++)
        total += numbers[i] ^ numbers[i] >> 3;
    return total;
}

int main(void)
{
    unsigned check = 0;
    double best = 1e9;
    for (int i = 0; i < COUNT; i++)
        numbers[i] = i * 2654435761u;
    for (int batch = 0; batch < BATCHES; batch++) {
        clock_t began = clock();
        for (int round = 0; round < ROUNDS; round++)
            numbers[round % COUNT] += check += sum();
        double took = (double)(clock() - began) / CLOCKS_PER_SEC;
        if (took < best)
            best = took;
    }
    printf("%s: sum %08x, %.2f ns a number\n", COMPILER, check, best / ROUNDS / COUNT * 1e9);
    return check == 0xCAFE;
}
