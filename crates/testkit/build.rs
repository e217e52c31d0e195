//! Compiles the protocol of the CRI client. The compiler is a crate, so that nobody has to install protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["cri.proto"], ["proto"])?;
    let generator = tonic_prost_build::configure().build_transport(false).build_server(false);
    Ok(generator.compile_fds(files)?)
}
