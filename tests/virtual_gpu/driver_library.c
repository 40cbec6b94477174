/* libcuda.so.1 for cuda-bindings: every function is the one that driver_library.py has for its name. */
static void *(*find)(const char *);

void find_with(void *(*function)(const char *)) { find = function; }

static int not_supported(void) { return 801; }

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    void *found = find ? find(name) : 0;
    *function = found ? found : (void *)not_supported;
    if (status) *status = 0;
    return 0;
}

int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
