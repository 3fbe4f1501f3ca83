-- Stage-in for the Flux job shell. Copy this file to /etc/flux/shell/lua.d/, and stage and unstage to /etc/zarrfs/flux.
-- A user can load it for one job: flux run -o userrc=/path/to/zarrfs.lua ...
--
-- A job requests data sets with ZARRFS_STAGE in its environment: lines of NAME SOURCE [OPTIONS], or comments ("#").
-- Before the tasks start, the job's user mounts each SOURCE at $ZARRFS_STAGED/NAME on each node of the job. After the
-- tasks have ended, the sources are unmounted.

local here = shell.getenv ("ZARRFS_FLUX_DIR") or "/etc/zarrfs/flux"
local staged -- the directory of the mounts, after stage-in

local function quoted (text)
    return "'" .. text:gsub ("'", "'\\''") .. "'"
end

local function job () -- the job's id, in any form; older shells set only FLUX_JOB_TMPDIR, whose last part is the id
    return shell.getenv ("FLUX_JOB_ID") or (shell.getenv ("FLUX_JOB_TMPDIR") or ""):match ("[^/]+$") or ""
end

-- Run a script as the job's user. Return whether it succeeded, and its output without the last newline. If it failed
-- without output, return a message instead, so that every failure has a reason.
local function run (script, ...)
    local command = "exec 2>&1; export ZARRFS_FLUX_SHELL=$PPID; " .. quoted (here .. "/" .. script)
    for _, argument in ipairs { ... } do
        command = command .. " " .. quoted (argument)
    end
    local pipe = io.popen (command .. "; echo \"status $?\"")
    local said = pipe:read ("*a")
    pipe:close ()
    local status = said:match ("status (%d+)\n$")
    said = said:gsub ("\n?status %d+\n$", "")
    if status ~= "0" and not said:match ("%S") then
        local how = status and "ended with status " .. status .. ", without a word" or "interrupted by a signal"
        said = script .. ": " .. how
    end
    return status == "0", said
end

plugin.register {
    name = "zarrfs",
    handlers = {
        {
            topic = "shell.init",
            fn = function ()
                local wanted = shell.getenv ("ZARRFS_STAGE")
                if not wanted or wanted == "" then
                    return true
                end
                local good, said = run ("stage", job (), wanted)
                if not good then
                    shell.die ("zarrfs: " .. said)
                    return false
                end
                staged = said
                shell.setenv ("ZARRFS_STAGED", staged)
                return true
            end,
        },
        {
            topic = "task.init", -- tasks may have taken their environment before shell.init
            fn = function ()
                if staged then
                    task.setenv ("ZARRFS_STAGED", staged)
                end
                return true
            end,
        },
        {
            topic = "shell.exit",
            fn = function ()
                if staged then
                    local good, said = run ("unstage", job ())
                    if not good then -- the epilog tries again, with --lazy
                        shell.log_error ("zarrfs: " .. said)
                    end
                end
                return true
            end,
        },
    },
}
