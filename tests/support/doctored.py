"""Facts about a good machine, as the doctor would find them."""

from gemini.doctor.report import DeviceFacts, Facts, FolderFacts

DISK = FolderFacts(
    "/disk", file_system="ext4", free_bytes=1 << 40, direct=True, engine="threads",
    read=4e9, write=2e9,
)  # fmt: skip
GPU = DeviceFacts("a GPU", "9.0", 80 << 30, 70 << 30, 3e12, 50e9, 40e9, 45e9, 4e14)
NO_TRITON = tuple((name, "1") for name in ("torch", "numpy", "psutil", "safetensors"))
GOOD = Facts(
    versions=(*NO_TRITON, ("triton", "3")),
    cores=8, load_average=0.5, ram_bytes=64 << 30, ram_left_bytes=60 << 30,
    ram_copy_bytes_per_s=30e9, cpu_flops={"bf16": 4e11, "fp32": 2e11}, memlock_bytes=None,
    huge_pages="madvise",
    temporary_file_system="ext4", c_compiler="/usr/bin/gcc", cxx_compiler="/usr/bin/g++",
    shadowed={}, malloc_tuned=True, restarts_cleanly=True,
    process={"floor": 400 << 20, "product": 9 << 16, "parameter": 10 << 10, "thread": 6 << 20},
    devices=(GPU,), folders=(DISK,),
)  # fmt: skip
