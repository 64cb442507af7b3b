#include <nanobind/nanobind.h>

void bind_board(nanobind::module_&) {}
