#include <nanobind/nanobind.h>

void bind_ring(nanobind::module_&) {}
